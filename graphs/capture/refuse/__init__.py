"""Checks that refuse models which a trace cannot reproduce faithfully; each error says why."""

from graphs.capture.refuse.aliasing import overlapping, refuse_overlapping, shared_storages
from graphs.capture.refuse.constants import HeldTensor, ReadTensors, refuse_writing_real_tensors
from graphs.capture.refuse.generators import (
    generators_of,
    made_generator_error,
    no_generators_made,
    own_generator_error,
    refuse_own_generator,
    restore_state,
    states_restored,
    system_numbers_noted,
)
from graphs.capture.refuse.generators import state_of as state_of_generator
from graphs.capture.refuse.gradient_dtypes import refuse_gradient_dtypes
from graphs.capture.refuse.hooks import (
    HOOKS,
    HookError,
    PairedHooksError,
    global_hooks,
    has_paired_hooks,
    has_refused_hook,
    refuse_hooks,
)
from graphs.capture.refuse.mixed_dtypes import RefusingMixedDtypes, refuse_mixed_dtypes
from graphs.capture.refuse.registered import Registered
from graphs.capture.refuse.replaced_forwards import (
    refuse_forwards_with_state,
    refuse_plans,
    refuse_replaced_forwards,
)
from graphs.capture.refuse.side_effects import (
    DrawError,
    LeftTensorsError,
    SideEffectError,
    around_module_calls,
    attributes_unchanged,
    buffers_of,
    is_bookkeeping,
    objects_unchanged,
    random_states_untouched,
    refuse_parametrization_cache,
    refuse_replaced_buffers,
)
from graphs.capture.refuse.tensors_in_attributes import MODULE_ATTRIBUTES
from graphs.capture.refuse.unseen_changes import (
    CALL_ORIGINAL,
    COMPILED,
    no_unseen_changes,
    no_untraced_calls,
)
