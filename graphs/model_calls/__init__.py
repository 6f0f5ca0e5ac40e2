"""Calls of a model: its arguments and outputs, flattened into lists of leaves and a structure, and
their names."""

from graphs.model_calls.call import (
    HOLE,
    Call,
    NoLossError,
    TraceError,
    argument_order,
    as_call,
    check_call,
    device_of,
    find_loss,
    signature_of,
)
from graphs.model_calls.forms import (
    buffer_forms,
    bytes_by_dtype,
    environment_of,
    input_forms,
    parameter_forms,
)
from graphs.model_calls.layouts import LayoutForShapes
from graphs.model_calls.names import named_state, tensor_names, title_of
from graphs.model_calls.nested import PLAIN_TYPES
from graphs.model_calls.tensors import (
    autograd_functions,
    dense_storage_key,
    distributed_as,
    fills_its_storage,
    gradient_bytes,
    gradient_dtype,
    is_distributed,
    is_distributed_class,
    local_part,
    named_arguments,
    same_strides,
    storage_key,
    strided_like,
)
