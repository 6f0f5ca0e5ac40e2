"""Planning a model that cannot be traced, of `scheduler_runtime.fallback`."""

from scheduler_runtime.fallback import FallbackError, SubmoduleSolution, plan_chain

__all__ = ["FallbackError", "SubmoduleSolution", "plan_chain"]
