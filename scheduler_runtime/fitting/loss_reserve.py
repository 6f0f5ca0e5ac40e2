"""What is reserved for a loss outside of the model: as given, guessed, or seen in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphs.costs import CostModel
from scheduler_runtime.fitting.loss_outside import LossBytes, LossSeen
from scheduler_runtime.fitting.loss_watch import LossWatch, can_watch
from scheduler_runtime.surroundings import size_on

SHARE_THAT_MATTERS = 0.01
"""Of what is available: a plan that has reserved less for a loss is not planned anew to gain it."""

Seen = Callable[[LossSeen | None, Sequence[bool]], None]


class LossReserve:
    """given: `loss_reserve` of `fit`."""

    def __init__(self, given: int | float | str | None) -> None:
        self._given = given
        self._seen: LossSeen | None = None
        self._watch: LossWatch | None = None

    def choices(
        self,
        outputs: Sequence[torch.Tensor],
        device: torch.device,
        *,
        is_watched: bool,
        n_passes: int,
        available_bytes: int,
    ) -> tuple[LossBytes, ...]:
        """To plan with, the first that fits. outputs: those that get a gradient.

        is_watched: whether the first step shows what the loss takes. Where what was seen does not
            fit, the first step of a plan with less tells by how much.
        n_passes: that the loss is computed from.
        available_bytes: for the peak. A guess that is a small share of them is as good as what the
            loss takes, so a plan with it is not made anew for less.
        """
        given_bytes = None
        if self._given is not None:
            given_bytes = size_on(device, self._given, what="loss_reserve")
        usual = LossBytes.of(outputs, given_bytes)
        if given_bytes is None:
            usual = usual.for_passes(n_passes, outputs)
        least = (usual, usual.without_held) if usual.held else (usual,)
        if self._seen is not None:
            seen = self._seen.for_outputs(outputs)
            is_enough = given_bytes is not None and seen.reserved <= given_bytes
            return least if is_enough else (seen, *least)
        if given_bytes is not None or not is_watched:
            return least
        cautious = LossBytes.cautious(outputs).for_passes(n_passes, outputs)
        matters = cautious.reserved >= SHARE_THAT_MATTERS * available_bytes
        return replace(cautious, is_cautious=matters), *least

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

        watch.begin(output, self._arrived(then))
        self._watch = watch

    def _arrived(self, then: Seen) -> Seen:
        def arrived(seen: LossSeen | None, reached: Sequence[bool]) -> None:
            self._seen = self._seen if seen is None else seen
            then(seen, reached)

        return arrived

    def goes_on(self, output: Any, then: Seen) -> bool:
        """Whether a watch that saw another pass goes on with this one's output, for one loss."""
        if self._watch is None or self._watch.is_over:
            return False
        self._watch.also(output, self._arrived(then))
        return True

    @contextlib.contextmanager
    def not_in_pass(self) -> Iterator[None]:
        """A forward pass of the module is no part of the loss that is watched."""
        watch = self._watch
        if watch is None or not watch.is_on_top:
            yield
            return
        watch.unwatch()
        try:
            yield
        finally:
            watch.watch()

    def take_off(self) -> None:
        """End a watch that has seen its loss, or will not see it any more."""
        if self._watch is not None and self._watch.is_over:
            self.stop_watching()

    def stop_watching(self) -> None:
        """In the training's own thread, outside of a backward pass."""
        if self._watch is not None and self._watch.end():
            self._watch = None
