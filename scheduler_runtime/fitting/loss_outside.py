"""What a loss outside of the model is taken to need: the plan is made before it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphs.capture import Capture
from graphs.graph import Graph
from graphs.training_step import with_unknown_loss
from scheduler_runtime.fitting.options import Options
from scheduler_runtime.surroundings import size_on
from solver.sizes_deadlines_progress import format_both

_IN_32_BITS = 4
_N_HELD = 2


@dataclass(frozen=True)
class LossBytes:
    """reserved: what it takes besides the outputs that it reads and their gradients.

    held: of that, for the whole step: targets as large as the outputs, and the terms that the value
        of `mse_loss` and its like keep, in 32 bits.
    """

    reserved: int
    held: int

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], reserved_bytes: int | None) -> LossBytes:
        """outputs: those that get a gradient. reserved_bytes: as the caller says (None: a copy for
        logarithms and one for their gradient, as cross-entropy takes; from 16 bits also a cast).
        """
        in_32_bits = [tensor.numel() * _IN_32_BITS for tensor in outputs]
        if reserved_bytes is None:
            copies = [2 if tensor.element_size() >= _IN_32_BITS else 3 for tensor in outputs]
            reserved_bytes = sum(n * of for n, of in zip(copies, in_32_bits, strict=True))
        return cls(reserved_bytes, min(reserved_bytes, _N_HELD * sum(in_32_bits)))

    @property
    def without_held(self) -> LossBytes:
        return replace(self, held=0)

    def around(self, graph: Graph) -> Graph:
        return with_unknown_loss(graph, reserved_bytes=self.reserved, held_bytes=self.held)

    @property
    def note(self) -> str:
        return (
            f"the loss is computed outside of the model; {format_both(self.reserved)} are reserved "
            f"for it besides the outputs and their gradients, {format_both(self.held)} of them for "
            "the whole step (or loss_reserve=)"
        )


def loss_outside(captured: Capture, device: torch.device, options: Options) -> LossBytes | None:
    """None: the model returns the loss."""
    outputs = [captured.outputs[i].meta["val"] for i in captured.gradient_outputs]
    returns_loss = len(outputs) == 1 and outputs[0].numel() == 1
    if returns_loss and options.loss_outputs is None:
        return None
    if options.loss_reserve is None:
        return LossBytes.of(outputs, None)
    return LossBytes.of(outputs, size_on(device, options.loss_reserve, what="loss_reserve"))
