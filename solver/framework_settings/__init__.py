"""Not code: the checkpointing setting of another training system that comes closest to a plan."""

from solver.framework_settings.closest_setting import Emitted, nearest
from solver.framework_settings.model_layers import NoLayersError, layers
from solver.framework_settings.systems import SYSTEMS
