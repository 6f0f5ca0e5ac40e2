"""Plans that checkpoint whole modules, as torch.utils.checkpoint runs them."""

from solver.module_checkpointing.eager_effects import EagerStep, held_by_variables
from solver.module_checkpointing.nested import SequentialSteps, best_in_loop
from solver.module_checkpointing.recomputation import Recomputation
from solver.module_checkpointing.region_plan import RegionPlan, plan_regions
from solver.module_checkpointing.regions import CheckpointRegion, RegionLayout
from solver.module_checkpointing.saving import MaySave
from solver.module_checkpointing.search import ModuleTree, NoModulesFitError, by_module
