"""What a loss outside of the model is taken to need: the plan is made before it is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphs.graph import Graph
from graphs.training_step import LOSS, with_unknown_loss
from solver.schedule import Compute, Solution
from solver.sizes_deadlines_progress import format_both

_IN_32_BITS = 4
_N_HELD = 2
_N_USUAL, _N_CAUTIOUS = 2, 5
"""Outputs in 32 bits: what cross-entropy and `mse_loss` take, and the most that those listed in
docs/bytes.md take in the first step."""


@dataclass(frozen=True)
class LossBytes:
    """reserved: what it takes besides the outputs that it reads and their gradients.

    held: of that, for the whole step: targets as large as the outputs, and the terms that the value
        of `mse_loss` and its like keep, in 32 bits.
    is_cautious: guessed from the sizes of the outputs, enough for nearly every loss, and so much
        that a loss that takes less is worth another plan.
    """

    reserved: int
    held: int
    is_cautious: bool = False

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], reserved_bytes: int | None) -> LossBytes:
        """outputs: those that get a gradient. reserved_bytes: as the caller says (None: a copy for
        logarithms and one for their gradient, as cross-entropy takes; from 16 bits also a cast).
        """
        if reserved_bytes is None:
            reserved_bytes = cls._outputs(outputs, _N_USUAL)
        return cls(reserved_bytes, min(reserved_bytes, _N_HELD * _in_32_bits(outputs)))

    @classmethod
    def cautious(cls, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """For a step that is planned before any loss was seen."""
        held_bytes = _N_HELD * _in_32_bits(outputs)
        return cls(cls._outputs(outputs, _N_CAUTIOUS), held_bytes, is_cautious=True)

    @staticmethod
    def _outputs(outputs: Sequence[torch.Tensor], n_times: int) -> int:
        """So many times the outputs in 32 bits, and their casts."""
        of_casts = [t for t in outputs if t.element_size() < _IN_32_BITS]
        return n_times * _in_32_bits(outputs) + _in_32_bits(of_casts)

    def for_passes(self, n: int, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """A loss over n such passes, guessed from one. While the first of them runs its backward
        pass, the gradients of the outputs of the others are there."""
        others_bytes = (n - 1) * sum(tensor.nbytes for tensor in outputs)
        return replace(
            self, reserved=n * self.reserved + others_bytes, held=n * self.held + others_bytes
        )

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


@dataclass(frozen=True)
class LossSeen:
    """What a loss has taken in a step that was watched.

    read_bytes: storages that it reads and that were there before: targets, another module.
    left_bytes: of what it made, there when the model's backward pass began, besides the gradients.
        A loop that gives it a name holds it until the loss of the next step takes its place.
    peak_bytes: the most of what it made, besides gradients of the outputs.
    output_bytes: of the outputs that got a gradient.
    """

    read_bytes: int
    left_bytes: int
    peak_bytes: int
    output_bytes: int

    @property
    def in_first_step(self) -> LossBytes:
        """As it was: nothing of a step before."""
        held = self.read_bytes + self.left_bytes
        return LossBytes(self.read_bytes + max(self.peak_bytes, self.left_bytes), held)

    def for_outputs(self, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """In later steps, in proportion to the outputs."""
        first = self.in_first_step
        share = sum(t.nbytes for t in outputs) / self.output_bytes
        reserved, held = first.reserved + self.left_bytes, first.held
        return LossBytes(math.ceil(share * reserved), math.ceil(share * held))


def peak_with(solution: Solution, planned: LossBytes, seen: LossBytes) -> int:
    """Bytes that the solution's schedule takes with another loss than it was planned for."""
    assert solution.schedule is not None
    assert solution.simulation is not None
    live = solution.simulation.live_bytes
    ops = zip(solution.schedule.ops, live, strict=True)
    at_loss = next(n for op, n in ops if isinstance(op, Compute) and op.node == LOSS)
    return max(max(live) + seen.held - planned.held, at_loss + seen.reserved - planned.reserved)


def _in_32_bits(outputs: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * _IN_32_BITS for tensor in outputs)
