"""Plan models that cannot be traced: submodules are measured in real steps, planned as a chain."""

from scheduler_runtime.by_submodule.planning import plan_chain, planned_for_command
from scheduler_runtime.by_submodule.solution import SubmoduleSolution, put
