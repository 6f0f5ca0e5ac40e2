"""What is reserved for a loss outside of the model: as given, guessed, or seen in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphs.costs import CostModel
from scheduler_runtime.fitting.loss_outside import LossBytes, LossSeen
from scheduler_runtime.fitting.loss_watch import LossWatch, can_watch
from scheduler_runtime.surroundings import size_on

Seen = Callable[[LossSeen | None, Sequence[bool]], None]


class LossReserve:
    """given: `loss_reserve` of `fit`."""

    def __init__(self, given: int | float | str | None) -> None:
        self._given = given
        self._seen: LossSeen | None = None
        self._watch: LossWatch | None = None

    def choices(
        self, outputs: Sequence[torch.Tensor], device: torch.device, *, is_watched: bool
    ) -> tuple[LossBytes, ...]:
        """To plan with, the first that fits. outputs: those that get a gradient.

        is_watched: whether the first step shows what the loss takes. Where what was seen does not
            fit, the first step of a plan with less tells by how much.
        """
        given_bytes = None
        if self._given is not None:
            given_bytes = size_on(device, self._given, what="loss_reserve")
        usual = LossBytes.of(outputs, given_bytes)
        least = (usual, usual.without_held) if usual.held else (usual,)
        if self._seen is not None:
            seen = self._seen.for_outputs(outputs)
            is_enough = given_bytes is not None and seen.reserved <= given_bytes
            return least if is_enough else (seen, *least)
        if given_bytes is not None or not is_watched:
            return least
        return LossBytes.cautious(outputs), *least

    def watch(
        self,
        output: Any,
        known: Iterable[torch.Tensor],
        *,
        costs: CostModel,
        device: torch.device,
        then: Seen,
    ) -> None:
        """See what the loss of this output takes. known: what the plan counts already."""
        if not can_watch():
            return
        watch = LossWatch(costs, device, known)

        def arrived(seen: LossSeen | None, reached: Sequence[bool]) -> None:
            self._seen = self._seen if seen is None else seen
            then(seen, reached)

        watch.begin(output, arrived)
        self._watch = watch

    def take_off(self) -> None:
        """End a watch that has seen its loss, or will not see it any more."""
        if self._watch is not None and self._watch.is_over:
            self.stop_watching()

    def stop_watching(self) -> None:
        """In the training's own thread, outside of a backward pass."""
        if self._watch is not None and self._watch.end():
            self._watch = None
