"""Plan models that cannot be traced (from `scheduler_runtime.fallback`)."""

from scheduler_runtime.fallback import FallbackError, SubmoduleSolution, plan_chain

__all__ = ["FallbackError", "SubmoduleSolution", "plan_chain"]
