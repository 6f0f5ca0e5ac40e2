"""Random generators of Python and NumPy that a forward pass may use, and their states.

torch's generators are seen operator by operator. Numbers from these would be constants of a traced
step. Besides the two global generators, they are searched for where a forward pass finds them: in
attributes of modules and of their classes, in containers there, in attributes of plain objects
there, and among the globals and closures that a forward names.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

_PYTHONS: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""


def generators_of(model: nn.Module) -> dict[str, Any]:
    """The generators by their name for messages: "the random.Random in 'mask.rng'"."""
    found: dict[int, tuple[str, Any]] = {}
    found[id(_PYTHONS)] = ("Python's random", _PYTHONS)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpys = numpy_random.mtrand._rand
        found[id(numpys)] = ("numpy.random", numpys)
    for path, module in model.named_modules():
        for name, value in _named(module):
            for each in _inside(value):
                if _is_generator(each):
                    kind = f"{type(each).__module__.partition('.')[0]}.{type(each).__name__}"
                    where = f"{path}.{name}" if path else name
                    found.setdefault(id(each), (f"the {kind} in {where!r}", each))
    return dict(found.values())


def state_of(generator: Any) -> Any:
    """Its state, as a comparable value."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    has_own = hasattr(generator, "get_state")
    return pickle.dumps(generator.get_state() if has_own else _bits(generator).state)


def put_back(generator: Any, state: Any) -> None:
    """Restore a state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        _bits(generator).state = pickle.loads(state)


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # it has no state
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.BitGenerator, numpy_random.RandomState)
    return isinstance(value, kinds)


def _named(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a forward pass of the module may refer to; PyTorch's own classes are skipped."""
    own = [k for k in type(module).__mro__ if not k.__module__.startswith(("torch.", "builtins"))]
    yield from vars(module).items()
    for kind in own:
        yield from vars(kind).items()
        forward = vars(kind).get("forward")
        if not isinstance(forward, FunctionType):
            continue
        code = forward.__code__
        for name in code.co_names:
            if name in forward.__globals__:
                yield name, forward.__globals__[name]
        for name, cell in zip(code.co_freevars, forward.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the cell is still empty
                continue


def _inside(value: Any) -> Iterator[Any]:
    """The value, the items of its containers, and the attributes of a plain object."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list | tuple):
            stack += each
        elif each is value and not isinstance(each, nn.Module | type | ModuleType):
            stack += (getattr(each, "__dict__", None) or {}).values()
