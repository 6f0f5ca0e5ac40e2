"""The optimizers that `fit` was given, which the training loop may drop and make anew."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from graphs.graph import warn


class HeldOptimizers:
    """They are held until they have state; then they train, and are the training loop's.

    A loop that makes another optimizer (for layers that are no longer frozen) would else have the
    state of both in memory.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._held: list[torch.optim.Optimizer] = list(optimizers)
        self._of_the_loop: list[weakref.ref[torch.optim.Optimizer]] = []

    def there(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that still exist."""
        found = (each() for each in self._of_the_loop)
        return *self._held, *(each for each in found if each is not None)

    def look(self, name: str) -> None:
        """Before each step. name: of the model, to warn where one is gone."""
        trains = [each for each in self._held if each.state]
        self._held = [each for each in self._held if not each.state]
        self._of_the_loop += map(weakref.ref, trains)
        if any(each() is None for each in self._of_the_loop):
            self._of_the_loop = [each for each in self._of_the_loop if each() is not None]
            warn(
                f"fit: the optimizer that fit was given for {name} is gone. Plans that are made "
                "from now on do not count the state of another one: remove(model), then "
                "fit(model, optimizer=optimizer, ...) with the optimizer that trains it now"
            )
