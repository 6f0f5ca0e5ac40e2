"""Attributes that one forward pass sets and later ones find: a causal mask, positions, a number.

A planned step would not set them. If such a value is computed from constants and buffers alone, and
later calls leave it there, every forward pass leaves the same value. So the value is computed
first, as if the module had been called before, and the step that finds it in the attribute is
traced. If the attribute holds another tensor in a later step, `HeldTensor` notices; if it holds
another number, `planned.guards` does.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphs.capture.as_eager import KnowingMode, Recipe, evaluate
from graphs.capture.refuse import (
    MODULE_ATTRIBUTES,
    Registered,
    SideEffectError,
    attributes_unchanged,
)
from graphs.model_calls import PLAIN_TYPES


@dataclass(frozen=True, eq=False)
class FilledAttribute:
    """An attribute of a module, and the value that every forward pass leaves there.

    module: path of the module.
    attribute: name of the attribute.
    value: a tensor, a plain value, or a list or tuple of these.
    persistent: for a buffer that forward registers: whether the state dict has it (None: the
        attribute is not a buffer).
    is_unread: whether forward is known to set the attribute before it reads it, so that the value
        left by an earlier call does not matter.
    """

    module: str
    attribute: str
    value: object
    persistent: bool | None = None
    is_unread: bool = False

    @property
    def is_plain(self) -> bool:
        return isinstance(self.value, PLAIN_TYPES)

    def set_on(self, model: nn.Module) -> None:
        """Set the attribute to the value, or register the buffer unless it is there."""
        module = model.get_submodule(self.module)
        if self.persistent is None:
            setattr(module, self.attribute, self.value)
        elif module._buffers.get(self.attribute) is None:
            assert isinstance(self.value, torch.Tensor)
            module.register_buffer(self.attribute, self.value, persistent=self.persistent)


def find_filled_attributes(
    model: nn.Module, mode: KnowingMode, run: Callable[[], object]
) -> tuple[FilledAttribute, ...]:
    """Find the attributes that a forward pass fills: with plain values, or tensors computed from
    constants and buffers alone, or lists and tuples of these.

    All attributes are restored afterwards.

    mode: the fake tensor mode to run under.
    run: calls the module on fake tensors.
    """
    before = {module: dict(vars(module)) for module in model.modules()}
    registered = Registered(model)
    found: list[FilledAttribute] = []
    with contextlib.suppress(SideEffectError), attributes_unchanged(model), mode:
        run()
        paths = {module: path for path, module in model.named_modules()}
        changed: list[tuple[nn.Module, str, Any, bool | None]] = [
            (module, attribute, value, None)
            for module in paths
            for attribute, value in vars(module).items()
            if attribute not in MODULE_ATTRIBUTES and _is_other(value, before[module], attribute)
        ]
        changed += [
            (module, name, buffer, name not in module._non_persistent_buffers_set)
            for module, name, buffer in registered.new_buffers()
        ]
        for module, attribute, value, persistent in changed:
            with contextlib.suppress(_UnknownValueError):
                real = _real_value(value, mode)
                found.append(FilledAttribute(paths[module], attribute, real, persistent))
    return tuple(found)


class _UnknownValueError(Exception):
    """A value depends on more than constants and buffers."""


def _is_other(value: object, before: Mapping[str, object], attribute: str) -> bool:
    """Whether an attribute has another value than before."""
    old = before.get(attribute, _MISSING)
    if isinstance(value, PLAIN_TYPES):
        return type(value) is not type(old) or value != old
    return value is not old


def _real_value(value: Any, mode: KnowingMode) -> Any:
    """What forward leaves in an attribute, with real tensors. Raises _UnknownValueError."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if type(value) in (list, tuple, torch.Size):
        return type(value)(_real_value(item, mode) for item in value)
    recipe = mode.value_of(value) if isinstance(value, FakeTensor) else None
    if not isinstance(recipe, Recipe) or not recipe.is_of_model:
        raise _UnknownValueError
    return evaluate(recipe, mode.leaves)


class SetBeforeRead:
    """A context that finds out which attributes forward sets before it reads them.

    While entered, the attributes are missing from their modules' `__dict__`, and descriptors on the
    classes watch them: a first read returns the value as usual, a first write marks the attribute
    as set before it is read. If the step also runs the same operators inside as outside, the value
    that an earlier call has left does not matter. A special value in the attribute would not do,
    since it could not notice `is None` or `isinstance`.
    """

    def __init__(self, model: nn.Module, places: Iterable[tuple[str, str]]) -> None:
        """places: module path and name of the attributes to watch."""
        self._places = tuple(places)
        self._modules = {path: model.get_submodule(path) for path, _ in self._places}
        self._watches: dict[tuple[type, str], _Watch] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for path, name in self._places:
            module = self._modules[path]
            default = inspect.getattr_static(type(module), name, _MISSING)
            if not hasattr(type(default), "__get__"):
                watch = self._watches.setdefault((type(module), name), _Watch(name, default))
                watch.unread_values[id(module)] = vars(module).get(name, default)
        for module in self._modules.values():
            # Restores the order of attributes too, since calls are also compared by it.
            attributes = vars(module)
            self._stack.callback(attributes.update, dict(attributes))
            self._stack.callback(attributes.clear)
        for (kind, name), watch in self._watches.items():
            for module in self._modules.values():
                if id(module) in watch.unread_values:
                    vars(module).pop(name, None)
            self._stack.enter_context(mock.patch.object(kind, name, watch, create=True))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def unread(self) -> Set[tuple[str, str]]:
        """The attributes that forward has set before it read them.

        Valid after a step inside that ran the same operators as outside.
        """
        return {
            (path, name)
            for path, name in self._places
            if (watch := self._watches.get((type(self._modules[path]), name))) is not None
            and id(self._modules[path]) in watch.set_first
        }


class _Watch:
    """A descriptor that watches an attribute of a class; other modules of the class do not notice.

    unread_values: id of a watched module -> the value to return if it reads the attribute first.
    set_first: ids of modules that have set the attribute before they read it.
    """

    def __init__(self, name: str, default: object) -> None:
        self._name, self._default = name, default
        self.unread_values: dict[int, object] = {}
        self.set_first: set[int] = set()

    def __get__(self, module: object, kind: type) -> Any:
        if id(module) in self.unread_values:
            value = self.unread_values.pop(id(module))
            if value is not _MISSING:
                vars(module)[self._name] = value
        own = {} if module is None else vars(module)
        value = own.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, module: object, value: object) -> None:
        if id(module) in self.unread_values:
            del self.unread_values[id(module)]
            self.set_first.add(id(module))
        vars(module)[self._name] = value

    def __delete__(self, module: object) -> None:
        self.__get__(module, type(module))
        vars(module).pop(self._name, None)


_MISSING = object()


@contextlib.contextmanager
def attributes_filled(model: nn.Module, filled: Sequence[FilledAttribute]) -> Iterator[None]:
    """While inside, the attributes have their values; buffers too are plain attributes."""
    with contextlib.ExitStack() as stack:
        for each in filled:
            attributes = vars(model.get_submodule(each.module))
            stack.enter_context(mock.patch.dict(attributes, {each.attribute: each.value}))
        yield
