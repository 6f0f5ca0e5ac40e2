"""The step with the optimizer's state in host memory, and optionally parameters, too."""

from graphs.host_state.parameter_loads import LOAD, loadable_parameters, with_loads
from graphs.host_state.state_on_host import (
    WHERE,
    StateBucket,
    buckets_in,
    host_parameter_bytes,
    host_parameters,
    optimizer_of,
    parameters_on_host,
    state_copies_s,
    streamed_step_s,
    streamed_workspace_bytes,
    with_state_on_device,
    with_state_on_host,
)
