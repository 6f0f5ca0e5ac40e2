"""Attributes that a forward pass sets and later ones find: a causal mask, positions, a number.

A planned step would not set them. Where nothing but constants went into them, they are what every
forward pass would leave, so they are computed first, as by a call before, and the step that finds
them there is traced. `HeldTensor` then notices another tensor, `planned.guards` another number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphs.capture.as_eager import KnowingMode, Recipe, evaluate
from graphs.capture.refuse import TORCHS_OWN, SideEffectError, attributes_unchanged

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Filled:
    """An attribute of a module, and what every forward pass leaves there.

    module: its path.
    value: a tensor, or a plain value.
    """

    module: str
    attribute: str
    value: object

    @property
    def is_plain(self) -> bool:
        return isinstance(self.value, _PLAIN)

    def put(self, model: nn.Module) -> None:
        """Set the attribute."""
        setattr(model.get_submodule(self.module), self.attribute, self.value)


def filled_once(
    model: nn.Module, mode: KnowingMode, run: Callable[[], object]
) -> tuple[Filled, ...]:
    """The attributes that a forward pass on fake tensors fills with constants, or sets to plain
    values; restores them."""
    before = {module: dict(vars(module)) for module in model.modules()}
    found: list[Filled] = []
    with contextlib.suppress(SideEffectError), attributes_unchanged(model), mode:
        run()
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                old = before[module].get(attribute, ...)
                is_other = (type(value), value) != (type(old), old)
                if isinstance(value, _PLAIN) and is_other and attribute not in TORCHS_OWN:
                    found.append(Filled(path, attribute, value))
                if value is old or not isinstance(value, FakeTensor):
                    continue
                recipe = mode.value_of(value)
                if isinstance(recipe, Recipe) and not recipe.leaves and not recipe.reads_constants:
                    found.append(Filled(path, attribute, evaluate(recipe, {})))
    return tuple(found)


@contextlib.contextmanager
def put_meanwhile(model: nn.Module, filled: Sequence[Filled]) -> Iterator[None]:
    """The values in their attributes while inside."""
    with contextlib.ExitStack() as stack:
        for each in filled:
            attributes = vars(model.get_submodule(each.module))
            stack.enter_context(mock.patch.dict(attributes, {each.attribute: each.value}))
        yield
