"""What plans reserve for a loss outside of the model: given by the user, guessed, or seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphs.costs import CostModel
from scheduler_runtime.fitting.loss_outside import LossBytes, LossSeen
from scheduler_runtime.fitting.loss_watch import LossWatch, OnArrival, can_watch
from scheduler_runtime.surroundings import size_on

SHARE_THAT_MATTERS = 0.01
"""A plan that reserves less than this share of the available bytes for a loss is not made again,
even if the loss takes less."""


class LossReserve:
    """Chooses what is reserved, and watches a loss to learn what it takes.

    given: `loss_reserve` of `fit`.
    """

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
        """The reserves to plan with, of which the first that fits is used.

        If what was seen does not fit, less is tried; the first step of a plan with less then warns
        by how much it exceeds the budget.

        outputs: the outputs that get a gradient.
        is_watched: whether the first step will show what the loss takes.
        n_passes: number of forward passes that the loss is computed from.
        available_bytes: the budget after the reserve. If a guess is a small share of it, the plan
            is not made again for a loss that takes less.
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
        on_seen: OnArrival,
    ) -> None:
        """Watch what the loss of this output takes.

        known: the tensors that the plan counts already.
        on_seen: called when the gradients of the output arrive.
        """
        if not can_watch():
            return
        watch = LossWatch(costs, device, known)
        watch.begin(output, self._storing_seen(on_seen))
        self._watch = watch

    def _storing_seen(self, on_seen: OnArrival) -> OnArrival:
        def store_and_call(seen: LossSeen | None, reached: Sequence[bool]) -> None:
            self._seen = self._seen if seen is None else seen
            on_seen(seen, reached)

        return store_and_call

    def extend_watch(self, output: Any, on_seen: OnArrival) -> bool:
        """Let a watch that is running for another pass also watch this output, for a common loss.

        Returns False if no watch is running.
        """
        if self._watch is None or self._watch.is_over:
            return False
        self._watch.watch_output(output, self._storing_seen(on_seen))
        return True

    @contextlib.contextmanager
    def pass_not_watched(self) -> Iterator[None]:
        """In this context, which is a forward pass of the module, the loss is not watched."""
        watch = self._watch
        if watch is None or not watch.is_on_top:
            yield
            return
        watch.unwatch()
        try:
            yield
        finally:
            watch.watch()

    def end_if_over(self) -> None:
        """End the watch if it has seen its loss, or cannot see it any more."""
        if self._watch is not None and self._watch.is_over:
            self.stop_watching()

    def stop_watching(self) -> None:
        """End the watch; to be called in the training's own thread, outside of a backward pass."""
        if self._watch is not None and self._watch.end():
            self._watch = None
