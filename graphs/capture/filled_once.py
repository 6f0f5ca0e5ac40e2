"""Attributes that the first forward pass fills and later ones read: a causal mask, positions.

A planned step would not fill them. Where nothing but constants went into them, they are what every
forward pass would make, so they are computed first, as by a call before, and the step that finds
them there is traced. `HeldTensor` then notices another value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphs.capture.as_eager import KnowingMode, Recipe, evaluate
from graphs.capture.refuse import HeldTensor, SideEffectError, attributes_unchanged


def filled_once(
    model: nn.Module, mode: KnowingMode, run: Callable[[], object]
) -> tuple[HeldTensor, ...]:
    """The attributes that a forward pass on fake tensors fills with constants; restores them."""
    before = {module: dict(vars(module)) for module in model.modules()}
    found: list[HeldTensor] = []
    with contextlib.suppress(SideEffectError), attributes_unchanged(model), mode:
        run()
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                if value is before[module].get(attribute) or not isinstance(value, FakeTensor):
                    continue
                recipe = mode.value_of(value)
                if isinstance(recipe, Recipe) and not recipe.leaves and not recipe.reads_constants:
                    found.append(HeldTensor(path, attribute, 0, evaluate(recipe, {})))
    return tuple(found)


@contextlib.contextmanager
def put_meanwhile(model: nn.Module, held: Sequence[HeldTensor]) -> Iterator[None]:
    """The tensors in their attributes while inside."""
    with contextlib.ExitStack() as stack:
        for each in held:
            attributes = vars(model.get_submodule(each.module))
            stack.enter_context(mock.patch.dict(attributes, {each.attribute: each.tensor}))
        yield
