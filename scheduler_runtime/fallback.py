"""Planning a model that cannot be traced, by its submodules: the public name of `by_submodule`."""

from scheduler_runtime.by_submodule import FallbackError, SubmoduleSolution, plan_chain

__all__ = ["FallbackError", "SubmoduleSolution", "plan_chain"]
