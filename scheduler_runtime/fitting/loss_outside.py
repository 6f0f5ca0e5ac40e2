"""The memory that a plan counts for a loss outside of the model, which is not known beforehand."""

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
"""Memory of a loss, in multiples of the outputs in 32 bits: what cross-entropy and `mse_loss` take,
and the most that any loss listed in docs/bytes.md takes in the first step."""


@dataclass(frozen=True)
class LossBytes:
    """The bytes of a loss outside of the model.

    reserved: bytes that it takes besides the outputs that it reads and their gradients.
    held: the part of `reserved` that is held for the whole step: targets as large as the outputs,
        and the terms that the value of losses like `mse_loss` keeps, in 32 bits.
    is_cautious: whether this is a guess from the sizes of the outputs that is enough for nearly
        every loss; it is worth planning again if the loss takes less.
    """

    reserved: int
    held: int
    is_cautious: bool = False

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], reserved_bytes: int | None) -> LossBytes:
        """The bytes of a usual loss.

        outputs: the outputs that get a gradient.
        reserved_bytes: as the user says (None: a copy of the outputs for logarithms and one for
            their gradient, as cross-entropy takes; for 16-bit outputs also a cast).
        """
        if reserved_bytes is None:
            reserved_bytes = cls._output_bytes(outputs, _N_USUAL)
        return cls(reserved_bytes, min(reserved_bytes, _N_HELD * _in_32_bits(outputs)))

    @classmethod
    def cautious(cls, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """A cautious guess, for a step that is planned before any loss was seen."""
        held_bytes = _N_HELD * _in_32_bits(outputs)
        return cls(cls._output_bytes(outputs, _N_CAUTIOUS), held_bytes, is_cautious=True)

    @staticmethod
    def _output_bytes(outputs: Sequence[torch.Tensor], n_times: int) -> int:
        """`n_times` the bytes of the outputs in 32 bits, plus casts of shorter ones."""
        cast_outputs = [t for t in outputs if t.element_size() < _IN_32_BITS]
        return n_times * _in_32_bits(outputs) + _in_32_bits(cast_outputs)

    def for_passes(self, n: int, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """A loss over n such passes, guessed from one. While one of them runs its backward pass,
        the gradients of the other passes' outputs are live."""
        others_bytes = (n - 1) * sum(tensor.nbytes for tensor in outputs)
        return replace(
            self, reserved=n * self.reserved + others_bytes, held=n * self.held + others_bytes
        )

    @property
    def without_held(self) -> LossBytes:
        return replace(self, held=0)

    def add_to(self, graph: Graph) -> Graph:
        return with_unknown_loss(graph, reserved_bytes=self.reserved, held_bytes=self.held)

    @property
    def note(self) -> str:
        return (
            f"the loss is computed outside of the model; {format_both(self.reserved)} are reserved "
            f"for it besides the outputs and their gradients, {format_both(self.held)} of them for "
            "the whole step; to change this, pass loss_reserve="
        )


@dataclass(frozen=True)
class LossSeen:
    """What a loss has taken in a step that was watched.

    read_bytes: storages that existed before and that the loss reads: targets, another module.
    left_bytes: storages made by the loss that are live when the model's backward pass begins,
        without gradients of the outputs. A training loop that assigns the loss to a variable holds
        them until the loss of the next step replaces it.
    peak_bytes: the most that was live at once of what the loss has made, without gradients of the
        outputs.
    output_bytes: bytes of the outputs that got a gradient.
    """

    read_bytes: int
    left_bytes: int
    peak_bytes: int
    output_bytes: int

    @property
    def in_first_step(self) -> LossBytes:
        """What it took in the first step, when nothing was held of a step before."""
        held = self.read_bytes + self.left_bytes
        return LossBytes(self.read_bytes + max(self.peak_bytes, self.left_bytes), held)

    def for_outputs(self, outputs: Sequence[torch.Tensor]) -> LossBytes:
        """What it takes in later steps with these outputs, in proportion to their bytes."""
        first = self.in_first_step
        share = sum(t.nbytes for t in outputs) / self.output_bytes
        reserved, held = first.reserved + self.left_bytes, first.held
        return LossBytes(math.ceil(share * reserved), math.ceil(share * held))


def peak_with(solution: Solution, planned: LossBytes, seen: LossBytes) -> int:
    """The peak of the solution's schedule with another loss than it was planned for."""
    assert solution.schedule is not None
    assert solution.simulation is not None
    live = solution.simulation.live_bytes
    ops = zip(solution.schedule.ops, live, strict=True)
    at_loss = next(n for op, n in ops if isinstance(op, Compute) and op.node == LOSS)
    return max(max(live) + seen.held - planned.held, at_loss + seen.reserved - planned.reserved)


def _in_32_bits(outputs: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * _IN_32_BITS for tensor in outputs)
