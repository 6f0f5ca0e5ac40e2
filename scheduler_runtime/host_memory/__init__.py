"""Parameters and optimizer state that are in host memory while nothing reads them."""

from scheduler_runtime.host_memory.applied_plans import hosted_optimizer, hosted_parameters
from scheduler_runtime.host_memory.optimizer_state import (
    bring_back,
    host_blocks,
    keep_on_host,
    on_device,
)
from scheduler_runtime.host_memory.parameters import parameters_on_device
