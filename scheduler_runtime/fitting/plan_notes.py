"""Notes for the user on what a plan of `fit` counts and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphs.graph import warn
from graphs.trace import CapturedStep
from scheduler_runtime.surroundings import Buckets
from solver.sizes_deadlines_progress import format_both


def notes_on(
    step: CapturedStep,
    buckets: Buckets | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    is_first: bool,
) -> tuple[str, ...]:
    """Sentences on what is counted, or not counted, although a user may expect otherwise.

    is_first: whether it is the model's first plan; then a missing optimizer is also warned of.
    """
    notes = list(step.graph.meta.notes)
    if not optimizers:
        notes.append("the optimizer's state is not counted: pass optimizer= to count it")
        if is_first:
            warn(f"fit: {notes[-1]}")
    if buckets is not None and buckets.separate_bytes:
        how = (
            "zero_grad(set_to_none=False) keeps the gradients in them, also in no_sync()"
            if buckets.are_for_views
            else "with gradient_as_bucket_view=True the gradients would live in them"
        )
        notes.append(
            f"DistributedDataParallel's buckets take {format_both(buckets.size_bytes)}; {how}"
        )
    return tuple(notes)
