"""Not code: the checkpointing setting of another training system that comes closest to a plan."""

from solver.module_checkpointing.for_other_frameworks.closest_setting import Emitted, nearest
from solver.module_checkpointing.for_other_frameworks.model_layers import NoLayersError, layers
from solver.module_checkpointing.for_other_frameworks.systems import SYSTEMS
