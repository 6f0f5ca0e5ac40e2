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
from solver.module_checkpointing.replay import replay_regions
from solver.module_checkpointing.search import ModulePlan, ModuleTree, NoModulesFitError, by_module
from solver.module_checkpointing.stretches import Stretch, play

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
    "play",
    "replay_regions",
    "shifted",
]
