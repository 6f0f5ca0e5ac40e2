"""Give a checkpoint the numbers of its forward pass again from generators that are not torch's own.

`torch.utils.checkpoint` restores the states of torch's default generators for a recomputation, but
not those of Python's and NumPy's generators, nor of generators that the model holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphs.capture import (
    generators_of,
    made_generator_error,
    restore_state,
    state_of_generator,
    states_restored,
)


class OtherGenerators:
    """The generators, except torch's default ones, that one forward pass draws from.

    modules: what runs in it. They are searched in each call, since training may give a module
        another generator.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._generators = self._found()
        self._drawn_from: list[tuple[Any, Any]] = []  # each with its state before the forward pass

    def _found(self) -> dict[tuple[int, str], Any]:
        """The generators that exist now, by the module and the place that hold them."""
        return {
            (i, name): each
            for i, module in enumerate(self._modules)
            for name, each in generators_of(module).items()
        }

    @contextlib.contextmanager
    def watched(self, context: Any) -> Iterator[None]:
        """A context for the forward pass, inside of another one."""
        before = [(each, state_of_generator(each)) for each in _distinct(self._generators.values())]
        with context:
            yield
        self._drawn_from = [(g, state) for g, state in before if state_of_generator(g) != state]

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """A context for a recomputation. It leaves the generators in their present states.

        Raises TraceError if it draws from a generator that the forward pass has made: its state at
        that time is not known. One that is made anew in each call is another object by then.
        """
        made = [(p, g) for p, g in self._found().items() if p not in self._generators]
        with states_restored([each for each, _ in self._drawn_from] + [each for _, each in made]):
            before = [state_of_generator(each) for _, each in made]
            for each, state in self._drawn_from:
                restore_state(each, state)
            try:
                yield
            finally:
                for ((_, name), each), state in zip(made, before, strict=True):
                    if state_of_generator(each) != state:
                        raise made_generator_error(name)


def _distinct(generators: Iterable[Any]) -> Iterable[Any]:
    return {id(each): each for each in generators}.values()
