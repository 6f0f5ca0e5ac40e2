"""Give a checkpoint the numbers of its forward pass again from generators that are not torch's own.

`torch.utils.checkpoint` restores the states of torch's default generators for a recomputation, but
not those of Python's and NumPy's generators, nor of generators that the model holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphs.capture import generators_of, restore_state, state_of_generator, states_restored


class OtherGenerators:
    """The generators, except torch's default ones, that one forward pass draws from.

    modules: what runs in it. They are searched in each call, since training may give a module
        another generator.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = (each for module in modules for each in generators_of(module).values())
        self._generators = list({id(each): each for each in found}.values())
        self._drawn_from: list[tuple[Any, Any]] = []  # each with its state before the forward pass

    @contextlib.contextmanager
    def watched(self, context: Any) -> Iterator[None]:
        """A context for the forward pass, inside of another one."""
        before = [(each, state_of_generator(each)) for each in self._generators]
        with context:
            yield
        self._drawn_from = [(g, state) for g, state in before if state_of_generator(g) != state]

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """A context for a recomputation. It leaves the generators in their present states."""
        with states_restored(each for each, _ in self._drawn_from):
            for each, state in self._drawn_from:
                restore_state(each, state)
            yield
