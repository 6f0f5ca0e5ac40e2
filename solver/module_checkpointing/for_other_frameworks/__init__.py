"""Find the activation-checkpointing setting of another training system that suits a budget best."""

from solver.module_checkpointing.for_other_frameworks.closest_setting import Emitted, nearest
from solver.module_checkpointing.for_other_frameworks.forecasts import forecast
from solver.module_checkpointing.for_other_frameworks.model_layers import NoLayersError, layers
from solver.module_checkpointing.for_other_frameworks.systems import SYSTEMS
