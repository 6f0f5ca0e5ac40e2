"""The closest activation-checkpointing setting of another training system."""

from solver.emit.closest_setting import Emitted, nearest
from solver.emit.model_layers import NoLayersError, layers
from solver.emit.systems import SYSTEMS
