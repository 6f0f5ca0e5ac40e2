"""Traces a module and a batch to one program of forward and backward, and to the graph's nodes."""

from graphs.capture.absent_card import can_trace_absent, for_absent_card
from graphs.capture.as_eager import CheckError, caching_configs
from graphs.capture.buffer_writes import Write
from graphs.capture.called_losses import CalledLoss, LossCalls, called_loss_of, overwrites_logits
from graphs.capture.captured_step import Capture, Source
from graphs.capture.checkpoints import at_each_checkpoint
from graphs.capture.extraction import (
    CPU_RANDOM_STATE_BYTES,
    Layout,
    Overwrite,
    extract,
)
from graphs.capture.gradient_copies import GradientCopy
from graphs.capture.joint_graph import (
    capture,
    fake_output,
    rehearse,
)
from graphs.capture.kept_program import KeptCapture
from graphs.capture.opaque import (
    OpaqueBackward,
    OpaqueForward,
    Planned,
    RandomSources,
)
from graphs.capture.own_failure import FailsOnBatchError, failures_not_logged
from graphs.capture.refuse import (
    HOOKS,
    MODULE_ATTRIBUTES,
    SideEffectError,
    attributes_unchanged,
    generators_of,
    global_hooks,
    has_paired_hooks,
    made_generator_error,
    no_generators_made,
    overlapping,
    refuse_gradient_dtypes,
    refuse_plans,
    refuse_replaced_forwards,
    restore_state,
    shared_storages,
    state_of_generator,
    states_restored,
)
from graphs.capture.rehearsal import Rehearsed
from graphs.capture.shell import leaves_of
from graphs.capture.tensor_parallel import MeshError, has_parallel_style
from graphs.capture.threads import one_at_a_time
from graphs.capture.traced_calls import VIEW_OF_SCATTER, is_backward, is_random, may_be_random
