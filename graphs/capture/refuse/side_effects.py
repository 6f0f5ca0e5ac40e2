"""Refuses side effects of a forward pass that a planned step would silently skip.

A planned step runs the operators that were traced. Hooks of submodules, changed attributes and
replaced buffers are Python, not operators: they would take effect once, while tracing, on tensors
without values. The same goes for a change of the random state; a number drawn from Python's or
NumPy's generator would be the same in every step. Each check restores what has changed, and its
error names the side effect.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import parametrize

from graphs.capture.refuse.generators import (
    generators_of,
    restore_state,
    state_of,
    system_numbers_noted,
)
from graphs.capture.refuse.registered import Registered
from graphs.capture.refuse.tensors_in_attributes import MODULE_ATTRIBUTES, tensors_restored
from graphs.capture.refuse.traced_hooks import capturing_hooks_removed, computed_weights
from graphs.model_calls import PLAIN_TYPES, nested, title_of


class SideEffectError(ValueError):
    """The forward pass has a side effect that a planned step would skip; says what and where.

    short: the message without advice.
    """

    def __init__(self, why: str, *, short: str = "") -> None:
        super().__init__(why)
        self.short = short or why


class LeftTensorsError(SideEffectError):
    """Forward leaves tensors in an attribute, or replaces a buffer."""


class DrawError(SideEffectError):
    """Forward draws random numbers from a generator that is not one of torch's default ones.

    module: the innermost module that does so.
    """

    def __init__(self, generator: str, module: nn.Module) -> None:
        super().__init__(
            f"forward draws numbers with {generator}, in {title_of(module)}; a planned step "
            "would use those of the first call in every step. Draw them with torch, pass them in "
            "with the batch, or draw them in a submodule that holds little else: that is planned "
            "as one piece"
        )
        self.module = module


@contextlib.contextmanager
def around_module_calls(
    before: Callable[[nn.Module], object], after: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """While inside, run callbacks before and after each module call of this thread.

    before: gets the module.
    after: takes no arguments.
    """
    here = threading.get_ident()

    def begin(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == here:  # another thread may run a step meanwhile
            before(module)

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() == here:
            after()

    hooks: tuple[Any, ...] = (begin, end)
    for hook in hooks:
        hook.is_of_trace = True
    with (
        nn.modules.module.register_module_forward_pre_hook(begin),
        nn.modules.module.register_module_forward_hook(end, always_call=True),
    ):
        yield


def refuse_parametrization_cache(model: nn.Module) -> None:
    """Raise SideEffectError inside of `parametrize.cached()`, which shares weights among calls."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise SideEffectError(
            "parametrize.cached() is on: several calls share the weights that the first one "
            "computes, but a planned step computes them in each call. Remove the cache, or "
            "activate it inside of forward"
        )


@contextlib.contextmanager
def attributes_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore attributes that change inside, and raise SideEffectError naming the first.

    A new attribute counts as a change (a cache that the first call fills: it would hold fake
    tensors), and so do a change to a list, dict, set or deque in an attribute, and a new parameter,
    buffer or submodule.
    """
    registered = Registered(model)
    before = {module: dict(vars(module)) for module in model.modules()}
    contents = list(_contents_of(model))
    try:
        with capturing_hooks_removed(model):
            yield
    finally:
        changed = [
            (module, attribute, vars(module).get(attribute))
            for module, attributes in before.items()
            for attribute in {**attributes, **vars(module)}
            if not _is_same(
                attributes.get(attribute, _MISSING), vars(module).get(attribute, _MISSING)
            )
        ]
        for module, attribute, _ in changed:
            if attribute in before[module]:  # keeps its position in the dict
                vars(module)[attribute] = before[module][attribute]
            else:
                del vars(module)[attribute]
        changed += _restore_contents(contents)
        changed_state = registered.restore()
    _refuse_registered(model, changed_state)
    changed = [
        (module, attribute, value)
        for module, attribute, value in changed
        if not is_bookkeeping(module, attribute)
    ]
    _refuse_changed(model, changed)


def is_bookkeeping(module: nn.Module, attribute: str) -> bool:
    """Whether PyTorch itself sets this attribute in each call, before it reads it."""
    if isinstance(module, nn.RNNBase) and attribute in _RNN_BOOKKEEPING:
        return True
    return attribute in computed_weights(module)


@contextlib.contextmanager
def objects_unchanged(model: nn.Module) -> Iterator[None]:
    """Like `attributes_unchanged`, for plain objects and tensors that attributes hold.

    For example, a config object in which forward counts its calls, or a tensor in a plain attribute
    that forward writes in place.
    """
    contents = list(_contents_of(model, in_objects=True))
    with tensors_restored(model) as written:
        try:
            yield
        finally:
            changed = _restore_contents(contents)
    _refuse_changed(model, changed + written)


_ChangedAttributes = list[tuple[nn.Module, str, Any]]
"""Changed attributes: (module, name of the attribute, what forward left there)."""


def _restore_contents(contents: Iterable[_Contents]) -> _ChangedAttributes:
    """Restore all containers; returns the attributes of those that had changed."""
    changed = []
    for each in contents:
        now = list(_items(each.container))
        if each.restore():
            changed.append((each.module, each.attribute, now))
    return changed


def _refuse_changed(model: nn.Module, changed: _ChangedAttributes) -> None:
    """Raise SideEffectError for the first changed attribute, if any."""
    if changed:
        names = {module: name for name, module in model.named_modules()}
        module, attribute, value = changed[0]
        where = names.get(module) or title_of(module)
        kind = LeftTensorsError if nested.tensors(value) else SideEffectError
        raise kind(
            f"forward changes the attribute {attribute!r} of {where!r}, which a planned step would "
            "not do; keep it in a buffer that is updated in place, or outside of forward"
            + (_STATE_ADVICE if nested.tensors(value) else "")
        )


def _refuse_registered(model: nn.Module, changed: list[tuple[nn.Module, str, str]]) -> None:
    """Raise SideEffectError for the first parameter, buffer or submodule that forward registers."""
    if changed:
        names = {module: name for name, module in model.named_modules()}
        module, kind, name = changed[0]
        raise SideEffectError(
            f"forward registers the {kind} {name!r} in {names.get(module) or title_of(module)!r}, "
            "which a planned step would not do; create it in __init__, or, where the first call "
            "alone does so, call the model once before it is planned"
            + ("" if kind == "buffer" else " and before its optimizer is made")
        )


_STATE_ADVICE = (
    ". A state for the next call can be returned, and passed in with the next batch; what the "
    "first call alone computes (a cache) is there if the model is called once before it is planned"
)


@dataclass(frozen=True)
class _Contents:
    """The items of a container, or of a plain object's dict, that a module's attribute holds."""

    module: nn.Module
    attribute: str
    container: Any
    items: tuple[Any, ...]

    def restore(self) -> bool:
        """Restore the items; returns whether they had changed."""
        now = _items(self.container)
        if len(now) == len(self.items) and all(map(_is_same, self.items, now)):
            return False
        self.container.clear()
        if isinstance(self.container, list | deque):
            self.container.extend(self.items)
        else:
            self.container.update(self.items)
        return True


def _contents_of(model: nn.Module, *, in_objects: bool = False) -> Iterator[_Contents]:
    """All containers in the attributes of the model's modules, each once.

    in_objects: whether to look into plain objects too.
    """
    seen: set[int] = set()
    for module in model.modules():
        for attribute, value in vars(module).items():
            stack = [] if attribute in MODULE_ATTRIBUTES else [value]
            while stack:
                each = stack.pop()
                if in_objects and _is_plain_object(each):
                    each = vars(each)
                if isinstance(each, list | deque | dict | set) and id(each) not in seen:
                    seen.add(id(each))
                    yield _Contents(module, attribute, each, _items(each))
                    stack += each.values() if isinstance(each, dict) else each


def _is_plain_object(value: object) -> bool:
    """Whether the value is an object of a user's class that has attributes.

    Objects of torch and the standard library are left out (apart from two kinds of namespaces): a
    logger, say, refers to much of the process.
    """
    kind = type(value)
    if issubclass(kind, nn.Module | torch.Tensor | type) or not kind.__dictoffset__:
        return False
    package = kind.__module__.partition(".")[0]
    own = package != "torch" and package not in sys.stdlib_module_names
    return own or kind in (types.SimpleNamespace, argparse.Namespace)


def _items(container: Any) -> tuple[Any, ...]:
    return tuple(container.items() if isinstance(container, dict) else container)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's current buffers by name; a shared buffer is under each of its names."""
    return dict(model.named_buffers(remove_duplicate=False))


def refuse_replaced_buffers(before: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Raise SideEffectError if forward has assigned a buffer (`self.mean = 0.9 * self.mean + ...`).

    New buffers are for `attributes_unchanged`.

    before: `buffers_of(model)` before forward was called.
    """
    now = buffers_of(model)
    for name, tensor in before.items():
        if now.get(name) is not tensor:
            raise LeftTensorsError(
                f"forward replaces buffer {name!r} by another tensor; update it in place "
                f"(self.{name.rpartition('.')[2]}.copy_(...)), or, where the first call alone "
                "replaces it, call the model once before it is planned"
            )


@contextlib.contextmanager
def random_states_untouched(model: nn.Module) -> Iterator[None]:
    """Raise if forward sets torch's random state, or draws from a generator that is not torch's.

    SideEffectError for the former, at the call; DrawError for the latter, on exit, once the
    generators have their former states again.
    """

    def refuse_seeding(*_args: object, **_kwargs: object) -> None:
        raise SideEffectError(
            "forward sets the random state (torch.manual_seed, torch.random.fork_rng), which a "
            "planned step would not do; set it before the step"
        )

    generators = generators_of(model)
    before = now = {name: state_of(each) for name, each in generators.items()}
    running = [model]
    found: list[DrawError] = []

    def note() -> None:
        """Blame the running module for what has been drawn since the last call of `note`."""
        nonlocal now
        earlier, now = now, {name: state_of(each) for name, each in generators.items()}
        found.extend(DrawError(name, running[-1]) for name in now if now[name] != earlier[name])

    def note_system() -> None:
        found.append(DrawError("a generator that the operating system has seeded", running[-1]))

    def begin(module: nn.Module) -> None:
        note()
        running.append(module)

    def end() -> None:
        if len(running) > 1:
            note()
            running.pop()

    try:
        with contextlib.ExitStack() as stack:
            for module in (torch, torch.random):
                for name in ("manual_seed", "seed", "set_rng_state"):  # fork_rng ends with the last
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, refuse_seeding))
            with around_module_calls(begin, end), system_numbers_noted(note_system):
                yield
                note()
    finally:
        for name, each in generators.items():
            if state_of(each) != before[name]:
                restore_state(each, before[name])
    if found:
        raise found[0]


_MISSING = object()
_RNN_BOOKKEEPING = ("_flat_weights", "_flat_weight_refs")
"""nn.LSTM, nn.GRU and nn.RNN list their weights here, and rebuild the list whenever one is set."""


def _is_same(before: Any, after: Any) -> bool:
    """Whether both are the same object, or equal plain values."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):  # its own entries: a subclass may refuse `len` (e3nn's Irreps)
        before, after = (tuple.__getitem__(each, slice(None)) for each in (before, after))
        return len(before) == len(after) and all(map(_is_same, before, after))
    return isinstance(before, PLAIN_TYPES) and bool(before == after)
