"""Plans made of whole-module checkpoints, as torch.utils.checkpoint runs them."""

from solver.module_checkpointing.eager import EagerStep
from solver.module_checkpointing.nested import (
    Row,
    Segment,
    best_segments,
    described,
    judged,
    shifted,
)
from solver.module_checkpointing.regions import Region
from solver.module_checkpointing.search import ModulePlan, ModuleTree, NoModulesFitError, by_module
from solver.module_checkpointing.stretches import Stretch, schedule_from_stretches
from solver.module_checkpointing.to_schedule import schedule_from_regions

__all__ = [
    "EagerStep",
    "ModulePlan",
    "ModuleTree",
    "NoModulesFitError",
    "Region",
    "Row",
    "Segment",
    "Stretch",
    "best_segments",
    "by_module",
    "described",
    "judged",
    "schedule_from_regions",
    "schedule_from_stretches",
    "shifted",
]
