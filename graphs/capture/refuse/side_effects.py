"""What a module does beside computing: a flat program would silently not do it, so it is refused.

A planned step runs the operators that were traced. Hooks of submodules, attributes that the forward
pass changes and buffers that it replaces are Python, not operators: they would run once, while
tracing, on tensors without values. So would a change of the random state, and a number from Python
or NumPy would be drawn once for all steps. Everything is put back as it was and the reason is said.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import parametrize

from graphs.capture.refuse.generators import generators_of, put_back, state_of
from graphs.capture.refuse.transformers_hooks import capturing_hooks_as_before, is_capturing

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class SideEffectError(ValueError):
    """The forward pass does something that a planned step would not do; says what and where."""


def global_hooks() -> tuple[Any, ...]:
    """Hooks that run for every module of the process, by their code.

    They are traced with the module: what one of them changes is in the program. A profiler may
    register a new closure of the same code with every step. Those of a trace do not count, nor do
    PyTorch's own (its FLOP counter's), which only look.
    """
    hooks = [h for of in _HOOKS for h in getattr(nn.modules.module, f"_global{of}").values()]
    functions = [getattr(h, "__func__", h) for h in hooks if not getattr(h, "is_of_trace", False)]
    own = [f for f in functions if not str(getattr(f, "__module__", "")).startswith("torch.")]
    return tuple(getattr(function, "__code__", function) for function in own)


def refuse_hooks(model: nn.Module) -> None:
    """Hooks of the model itself run around the planned step; those of its parts would not run."""
    for name, module in model.named_modules():
        for attribute, kind in _HOOKS.items():
            hooks = getattr(module, attribute).values()
            if module is not model and not all(map(is_capturing, hooks)):
                raise SideEffectError(
                    f"submodule {name!r} has a {kind}, which a planned step would not run; "
                    "remove it, put it on the model itself or on parameters, or write what it "
                    "computes into forward (torch.nn.utils.parametrizations instead of the older "
                    "weight_norm and spectral_norm)"
                )


def refuse_parametrization_cache(model: nn.Module) -> None:
    """Weights that calls share while the cache is on would be computed anew by a planned step."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise SideEffectError(
            "parametrize.cached() is on, under which several calls share the weights that the "
            "first one computes; a planned step computes them once in each call: leave the cache "
            "out, or turn it on inside of forward"
        )


@contextlib.contextmanager
def attributes_unchanged(model: nn.Module) -> Iterator[None]:
    """Put back plain attributes that change inside, and say which.

    Raises SideEffectError after restoring. Names that start anew (caches filled in the first
    call) count as changes too: their values would be tensors without contents. So does what is
    written into a list, dict, set or deque of an attribute.
    """
    before = {module: dict(vars(module)) for module in model.modules()}
    contents = list(_contents_of(model))
    try:
        with capturing_hooks_as_before(model):
            yield
    finally:
        changed = [
            (module, attribute)
            for module, attributes in before.items()
            for attribute in {**attributes, **vars(module)}
            if not _same(attributes.get(attribute, _MISSING), vars(module).get(attribute, _MISSING))
        ]
        for module, attribute in changed:
            vars(module).pop(attribute, None)
            if attribute in before[module]:
                vars(module)[attribute] = before[module][attribute]
        changed += [(each.module, each.attribute) for each in contents if each.put_back()]
    changed = [pair for pair in changed if pair[1] not in _RNN_BOOKKEEPING or not _is_rnn(pair[0])]
    if changed:
        names = {module: name for name, module in model.named_modules()}
        module, attribute = changed[0]
        where = names.get(module) or type(module).__name__
        raise SideEffectError(
            f"forward changes the attribute {attribute!r} of {where!r}, which a planned step would "
            "not do; keep it in a buffer that is changed in place, or outside of forward"
        )


@dataclass(frozen=True)
class _Contents:
    """What a container in an attribute of a module holds."""

    module: nn.Module
    attribute: str
    container: Any
    items: tuple[Any, ...]

    def put_back(self) -> bool:
        """Whether it holds something else by now; then it holds the same again."""
        now = _items(self.container)
        if len(now) == len(self.items) and all(map(_same, self.items, now)):
            return False
        self.container.clear()
        if isinstance(self.container, list | deque):
            self.container.extend(self.items)
        else:
            self.container.update(self.items)
        return True


def _contents_of(model: nn.Module) -> Iterator[_Contents]:
    seen: set[int] = set()
    for module in model.modules():
        for attribute, value in vars(module).items():
            stack = [] if attribute in TORCHS_OWN else [value]
            while stack:
                each = stack.pop()
                if isinstance(each, list | deque | dict | set) and id(each) not in seen:
                    seen.add(id(each))
                    yield _Contents(module, attribute, each, _items(each))
                    stack += each.values() if isinstance(each, dict) else each


def _items(container: Any) -> tuple[Any, ...]:
    return tuple(container.items() if isinstance(container, dict) else container)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers as they hang on the modules now, shared ones under each of their names."""
    return dict(model.named_buffers(remove_duplicate=False))


def refuse_replaced_buffers(before: dict[str, torch.Tensor], model: nn.Module) -> None:
    """`self.mean = 0.9 * self.mean + ...` puts another tensor in the buffer's place."""
    for name, tensor in buffers_of(model).items():
        if before.get(name) is not tensor:
            raise SideEffectError(
                f"forward puts another tensor in the place of buffer {name!r}; change it in place "
                f"(self.{name.rpartition('.')[2]}.copy_(...))"
            )


@contextlib.contextmanager
def random_states_untouched(model: nn.Module) -> Iterator[None]:
    """Refuse what changes torch's random state from Python, and numbers that are not torch's."""
    own = generators_of(model)
    states = _states_elsewhere() | {name: state_of(each) for name, each in own.items()}
    places = [(m, name) for m in (torch, torch.random) for name in _SEEDING if hasattr(m, name)]
    try:
        with contextlib.ExitStack() as stack:
            for module, name in places:
                stack.enter_context(mock.patch.object(module, name, _refuse_seeding))
            yield
    finally:
        after = _states_elsewhere() | {name: state_of(each) for name, each in own.items()}
        drawn = [name for name, state in states.items() if state != after[name]]
        _put_back(states)
        for name, each in own.items():
            if name in drawn:
                put_back(each, states[name])
    if drawn:
        raise SideEffectError(
            f"forward draws numbers with {drawn[0]}, which a planned step would do once for all "
            "steps; draw them with torch, or hand them in with the batch"
        )


_SEEDING = ("manual_seed", "seed", "set_rng_state")  # fork_rng ends with the last


def _refuse_seeding(*_args: object, **_kwargs: object) -> None:
    raise SideEffectError(
        "forward sets the random state (torch.manual_seed, torch.random.fork_rng), which a planned "
        "step would not do; set it before the step"
    )


def _states_elsewhere() -> dict[str, Any]:
    """The random states of Python and, where it is loaded, of NumPy, as plain values."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, key, *rest = numpy_random.get_state()
        states["numpy.random"] = (kind, key.tolist(), *rest)
    return states


def _put_back(states: Mapping[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy.random" in states:
        sys.modules["numpy.random"].set_state(states["numpy.random"])


TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, submodules and hooks."""
_MISSING = object()
_RNN_BOOKKEEPING = ("_flat_weights", "_flat_weight_refs")
"""nn.LSTM and its kin list their weights beside the parameters, anew whenever one is set."""


def _is_rnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)


def _same(before: Any, after: Any) -> bool:
    """The same object, or equal plain values."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    return isinstance(before, bool | int | float | str | None) and before == after
