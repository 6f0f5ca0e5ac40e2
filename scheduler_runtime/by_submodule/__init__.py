"""Plan models that cannot be traced: submodules are measured in real steps, planned as a chain."""

from scheduler_runtime.by_submodule.planning import FallbackError, plan_chain
from scheduler_runtime.by_submodule.solution import SubmoduleSolution, put_checkpoints
