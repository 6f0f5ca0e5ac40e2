"""Forward passes that wait for a backward pass together, as in contrastive losses and DPO.

A plan is for one forward pass and its backward pass. What other passes hold meanwhile is not in it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphs.model_calls import nested
from scheduler_runtime.execute import maker_of
from scheduler_runtime.fitting.options import Fitted
from solver.sizes_deadlines_progress import format_both


class PassesInFlight:
    """Of one planned module. Warns once."""

    def __init__(self) -> None:
        self._waiting: set[weakref.ref[Any]] = set()
        self._told = False

    def note(self, output: Any, model: nn.Module, plans: Iterable[Fitted]) -> None:
        """The model has returned this, by one of these plans."""
        if self._told:
            return
        self._add(output)
        if len(self._waiting) > 1:
            self._told = True
            warnings.warn(_words(len(self._waiting), model, plans), stacklevel=3)

    def _add(self, output: Any) -> None:
        made = [t for t in nested.tensors(output) if maker_of(t) is not None]
        if not made:
            return
        function: Any = made[0].grad_fn
        # It is gone when its graph is freed without a backward pass.
        waits = weakref.ref(function, self._waiting.discard)
        waiting = self._waiting

        def begins(_gradients: tuple[torch.Tensor | None, ...]) -> None:
            waiting.discard(waits)

        self._waiting.add(waits)
        function.register_prehook(begins)


def _words(n_passes: int, model: nn.Module, plans: Iterable[Fitted]) -> str:
    judged = [each.solution.simulation for each in plans]
    saved_bytes = max((each.saved_bytes for each in judged if each is not None), default=0)
    return (
        f"fit: {n_passes} forward passes of {type(model).__name__} wait for a backward pass "
        "together, and the budget is for one: each of the others holds up to "
        f"{format_both(saved_bytes)} more. Take that off the budget, call the model once on the "
        "batches concatenated, or run each pass backward before the next one"
    )
