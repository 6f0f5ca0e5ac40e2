"""Not code: the checkpointing setting of another training system that comes closest to a plan."""

from solver.emit.closest_setting import Emitted, nearest
from solver.emit.model_layers import NoLayersError, layers
from solver.emit.systems import SYSTEMS
