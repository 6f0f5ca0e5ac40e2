"""Attributes that a forward pass sets and later ones find: a causal mask, positions, a number.

A planned step would not set them. Where nothing but constants went into them, they are what every
forward pass would leave, so they are computed first, as by a call before, and the step that finds
them there is traced. `HeldTensor` then notices another tensor, `planned.guards` another number.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
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
    is_unread: whether forward is known to set it before it reads it, so that what the call before
        left there decides about nothing.
    """

    module: str
    attribute: str
    value: object
    is_unread: bool = False

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


class SetBeforeRead:
    """A context in which plain attributes that forward sets are missing until it sets them.

    A step that runs inside as it does outside, and reads none of them before it sets it, is the
    same whatever the call before has left there. Each is watched by a descriptor of its class,
    since `is None` or `isinstance` cannot be seen by what is in the attribute.
    """

    def __init__(self, model: nn.Module, filled: Sequence[Filled]) -> None:
        self._filled = tuple(filled)
        self._modules = {each.module: model.get_submodule(each.module) for each in filled}
        self._watches: dict[tuple[type, str], _Watch] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for each in self._filled:
            module, name = self._modules[each.module], each.attribute
            default = inspect.getattr_static(type(module), name, _MISSING)
            if each.is_plain and not hasattr(type(default), "__get__"):
                place = type(module), name
                watch = self._watches.setdefault(place, _Watch(name, default))
                watch.waiting[id(module)] = each.value
        for module in self._modules.values():
            # Put back in their order, which is a part of what calls are compared by.
            attributes = vars(module)
            self._stack.callback(attributes.update, dict(attributes))
            self._stack.callback(attributes.clear)
        for (kind, name), watch in self._watches.items():
            for module in self._modules.values():
                if id(module) in watch.waiting:
                    del vars(module)[name]
            self._stack.enter_context(mock.patch.object(kind, name, watch, create=True))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def marked(self) -> tuple[Filled, ...]:
        """The attributes, after a step inside that ran as it does outside."""
        found = []
        for each in self._filled:
            module = self._modules[each.module]
            watch = self._watches.get((type(module), each.attribute))
            is_unread = watch is not None and id(module) in watch.set_first
            found.append(replace(each, is_unread=is_unread))
        return tuple(found)


class _Watch:
    """In place of an attribute of a class; other modules of the class see what they saw before.

    waiting: by the module's id, what it reads where it has not set the attribute yet.
    set_first: ids of modules that set it before they read it.
    """

    def __init__(self, name: str, default: object) -> None:
        self._name, self._default = name, default
        self.waiting: dict[int, object] = {}
        self.set_first: set[int] = set()

    def __get__(self, module: object, kind: type) -> Any:
        if id(module) in self.waiting:
            vars(module)[self._name] = self.waiting.pop(id(module))
        own = {} if module is None else vars(module)
        value = own.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, module: object, value: object) -> None:
        if id(module) in self.waiting:
            del self.waiting[id(module)]
            self.set_first.add(id(module))
        vars(module)[self._name] = value

    def __delete__(self, module: object) -> None:
        self.__get__(module, type(module))
        vars(module).pop(self._name, None)


_MISSING = object()


@contextlib.contextmanager
def put_meanwhile(model: nn.Module, filled: Sequence[Filled]) -> Iterator[None]:
    """The values in their attributes while inside."""
    with contextlib.ExitStack() as stack:
        for each in filled:
            attributes = vars(model.get_submodule(each.module))
            stack.enter_context(mock.patch.dict(attributes, {each.attribute: each.value}))
        yield
