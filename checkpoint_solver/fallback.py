"""Planning a model that cannot be traced, of `scheduler_runtime.fallback`."""

from scheduler_runtime.fallback import SubmoduleSolution, plan_chain

__all__ = ["SubmoduleSolution", "plan_chain"]
