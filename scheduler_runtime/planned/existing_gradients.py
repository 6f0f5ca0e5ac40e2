"""Warn about gradients that exist before a step, but that its plan does not count."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from graphs.passes import passes_of
from graphs.training_step import FRESH, OF_PASSES
from scheduler_runtime.planned.plan import Plan
from solver.sizes_deadlines_progress import format_size_up

logger = logging.getLogger(__name__)


def warn_of_existing(
    model: nn.Module, trained: Sequence[nn.Parameter], plans: Sequence[Plan]
) -> bool:
    """Warn if gradients that no plan counts may take the step above its budget.

    A plan for a step without existing gradients counts only the new ones, from the operators that
    make them. Existing gradients stay for the whole step, so it takes at most their bytes more.

    trained: the model's parameters that get gradients.

    Returns whether it has warned.
    """
    environment = plans[0].environment
    counts_them = environment.get("gradients", FRESH) not in (FRESH, OF_PASSES)
    if counts_them or passes_of(environment).accumulate:
        return False
    existing_bytes = sum(p.nbytes for p in trained if p.grad is not None)
    if not existing_bytes:
        return False
    above_bytes = existing_bytes + max(p.peak_bytes - p.request.available_bytes for p in plans)
    if above_bytes <= 0:
        return False
    logger.warning(
        "%s is called with existing gradients of %s, but its plan is for a step that starts "
        "without gradients: this step and others like it may take up to %s more than the budget. "
        "For gradient accumulation plan "
        'with solve(..., gradients="accumulate") or --accumulate, or use fit, which plans both '
        "kinds of steps; else call zero_grad() with set_to_none=True before each step",
        type(model).__name__,
        format_size_up(existing_bytes),
        format_size_up(above_bytes),
    )
    return True
