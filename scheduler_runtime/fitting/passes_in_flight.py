"""Forward passes that wait for a backward pass together, as in contrastive losses and DPO.

A plan is for one forward pass and its backward pass. What other passes hold meanwhile is not in it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from graphs.model_calls import nested
from scheduler_runtime.execute import maker_of


class PassesInFlight:
    """Of one planned module."""

    def __init__(self) -> None:
        self._waiting: set[weakref.ref[Any]] = set()

    def with_one_more(self, output: Any) -> int:
        """How many passes wait for their backward pass; output: of the one that has just run."""
        made = [t for t in nested.tensors(output) if maker_of(t) is not None]
        if not made:
            return 0
        function: Any = made[0].grad_fn
        # It is gone when its graph is freed without a backward pass.
        waits = weakref.ref(function, self._waiting.discard)
        waiting = self._waiting

        def begins(_gradients: tuple[torch.Tensor | None, ...]) -> None:
            waiting.discard(waits)

        self._waiting.add(waits)
        function.register_prehook(begins)
        return len(self._waiting)
