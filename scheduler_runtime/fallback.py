"""Planning a model that cannot be traced, by its submodules: the public name of `by_submodule`."""

from scheduler_runtime.by_submodule import SubmoduleSolution, plan_chain, planned_for_command

__all__ = ["SubmoduleSolution", "plan_chain", "planned_for_command"]
