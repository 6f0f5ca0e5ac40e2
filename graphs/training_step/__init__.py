"""What a training step has besides the traced module: loss, gradient accumulation, optimizer."""

from graphs.training_step.around import (
    ACCUMULATE,
    FRESH,
    LOSS,
    OF_MICRO_BATCHES,
    OF_PASSES,
    TAKEN,
    accumulation,
    with_accumulation,
    with_dropped_outputs,
    with_loss_bytes,
    with_optimizer,
    with_resident,
    with_unknown_loss,
)
from graphs.training_step.device_bytes import cublas_workspace_bytes, with_device_bytes
from graphs.training_step.given_optimizer import (
    GivenOptimizer,
    is_optimizer_factory,
    read_optimizer,
)
from graphs.training_step.loss_only import LossOnly
from graphs.training_step.optimizer import (
    check_parameters,
    combined_figures,
    optimizer_costs,
    state_tensors,
    without_state,
)
from graphs.training_step.outside_loss import MetaOutputs, OutsideLoss
from graphs.training_step.stage import check_stage, indices_with_gradient
from graphs.training_step.state_buckets import (
    aligned,
    movable_state,
    trained_parameters,
    why_state_stays,
)
