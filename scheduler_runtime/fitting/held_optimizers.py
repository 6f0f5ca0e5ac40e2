"""The optimizers that `fit` was given, which the training loop may drop and make anew."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from graphs.graph import warn


class HeldOptimizers:
    """Holds each optimizer until it has state, and only a weak reference from then on.

    An optimizer with state is in use, so the training loop holds it. If the loop replaces it (to
    train layers that were frozen before), its state can be freed.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._held: list[torch.optim.Optimizer] = list(optimizers)
        self._in_use: list[weakref.ref[torch.optim.Optimizer]] = []

    def existing(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that still exist."""
        found = (each() for each in self._in_use)
        return *self._held, *(each for each in found if each is not None)

    def release_used(self, name: str) -> None:
        """Called before each step: let go of optimizers in use, and warn if one is gone.

        name: the model's, for the warning.
        """
        used = [each for each in self._held if each.state]
        self._held = [each for each in self._held if not each.state]
        self._in_use += map(weakref.ref, used)
        if any(each() is None for each in self._in_use):
            self._in_use = [each for each in self._in_use if each() is not None]
            warn(
                f"fit: the optimizer that fit was given for {name} is gone. Plans that are made "
                "from now on do not count the state of another one: remove(model), then "
                "fit(model, optimizer=optimizer, ...) with the optimizer that trains it now"
            )
