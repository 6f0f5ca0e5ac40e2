"""Random numbers that a forward pass branches on, computed from the generator's state.

LayerDrop draws a number for each layer, and skips the layer `if` the number is small. That number
follows from the generator's state before the call and from the random operators that run earlier in
it. How far these advance the generator depends only on the shapes, strides, dtypes and devices of
their arguments, not on values. So the branch can be found without running the step: only the random
operators are run, on tensors of the same form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from graphs.model_calls import named_arguments

_OWN_OPERATORS = ("dropout_noise", "bernoulli_fill", "normal_fill", "random_fill")
_DRAWS_KNOWN_FROM_FORM = {f"checkpoint_solver::{name}" for name in _OWN_OPERATORS} | {
    f"aten::{name}"
    for name in (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "bernoulli_", "native_dropout", "uniform", "uniform_", "random", "random_"),
        *("normal", "normal_", "normal_functional", "exponential", "exponential_"),
    )
}
"""Operators whose number of draws does not depend on the values of their arguments. (The exception,
`randint_like` with a tensor for `high`, is left out in `Draws.note`.)"""


_RESULT_DEPENDS_ON_VALUES = (
    torch.ops.aten.bernoulli.default,
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.normal.Tensor_float,
    torch.ops.aten.normal.float_Tensor,
)
"""Those of the operators above whose result depends on the values of their only tensor."""


MAX_KEPT_BYTES = 512
"""The largest value that is kept for other programs. Plans do not count these bytes."""


@dataclass(frozen=True)
class _Form:
    """The form of a tensor argument, in its place."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        """A tensor of zeros of this form."""
        zeros = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return zeros.zero_()


class Replay:
    """Results of random calls from one state of a generator, shared by all programs of a module.

    The programs of one module begin with the same random calls, so each call is run once, however
    many programs are compared with a step.

    start: the generator's state before the step.
    values: key of a value -> the value, of up to `MAX_KEPT_BYTES` bytes.
    states_after: key of a program's first calls -> the generator's state after them. Only the
        states before and after the last call that was asked for are kept, since each takes
        kilobytes.
    """

    _last: ClassVar[dict[str, Replay]] = {}  # by the type of the device

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start
        self.values: dict[bytes, Any] = {}
        self.states_after: dict[bytes, torch.Tensor] = {}

    @classmethod
    def of(cls, device: str, state: torch.Tensor) -> Replay:
        """The Replay of this state; only that of the latest state is kept for each device type."""
        last = cls._last.get(device)
        if last is None or not torch.equal(last.start, state):
            last = cls._last[device] = cls(state.clone())
        return last

    def keep(self, key: bytes, value: Any) -> None:
        """Keep a value for other programs, unless it is large: plans do not count its bytes."""
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        if all(each.untyped_storage().nbytes() <= MAX_KEPT_BYTES for each in tensors):
            self.values[key] = value


def key_of(*items: Any) -> bytes:
    """A digest of plain values, dtypes, devices, operators and keys; the same for equal items."""
    return hashlib.sha256(repr(items).encode()).digest()


class Draws:
    """The random calls of one trace on one device, in order.

    known: whether the generator's state can still be computed, that is, whether all calls so far
        draw as many numbers whatever the values of their arguments are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = True
        self._calls: list[tuple[Any, list[Any], pytree.TreeSpec]] = []
        self._keys = [key_of(device, torch.get_default_dtype())]  # of the first 0, 1, ... calls

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Record a random call.

        Returns its position among the calls, or None if its result cannot be computed.
        """
        given = named_arguments(func, args, kwargs)
        for argument in func._schema.arguments:
            is_switch = argument.name in ("dropout_p", "draws")
            if is_switch and not given.get(argument.name, argument.default_value):
                return None  # draws nothing: attention without dropout, or an opaque part
        # With a tensor for `high`, the range decides whether each number takes 32 or 64 bits.
        name, arguments = func._schema.name, func._schema.arguments
        n_tensors = sum(isinstance(each.type, torch.TensorType) for each in arguments)
        is_of_range = name == "aten::randint_like" and n_tensors > 1
        self.known &= name in _DRAWS_KNOWN_FROM_FORM and not is_of_range
        if not self.known:
            return None
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        flat_forms = [
            _Form(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t
            for t in flat
        ]
        self._calls.append((func, flat_forms, spec))
        self._keys.append(key_of(self._keys[-1], func, flat_forms, spec))
        # A second tensor (the probabilities of `bernoulli_`, a deviation) is read for its values.
        returns_by_form = func not in _RESULT_DEPENDS_ON_VALUES and n_tensors <= 1
        return len(self._calls) - 1 if returns_by_form else None

    def key(self, position: int) -> bytes:
        """The key of a call's result; equal for calls that return the same from the same state."""
        return self._keys[position + 1]

    def result(self, position: int, state: torch.Tensor) -> torch.Tensor:
        """What the call at this position returns if the step starts with this generator state."""
        replay, key = Replay.of(self.device.type, state), self.key(position)
        if key in replay.values:
            return replay.values[key]  # type: ignore[no-any-return]
        result = self._replay(position, replay)
        replay.keep(key, result)
        return result

    def _replay(self, position: int, replay: Replay) -> torch.Tensor:
        """Run the call, and first those before it from the last one whose state is known.

        The generator has its former state afterwards.
        """
        known = (n for n in range(position, 0, -1) if self._keys[n] in replay.states_after)
        first = next(known, 0)
        generator = torch.default_generator
        if self.device.type == "cuda":  # torch.cuda.set_rng_state is refused while tracing
            generator = torch.cuda.default_generators[self.device.index or 0]
        present_state = generator.get_state()
        try:
            generator.set_state(replay.states_after.get(self._keys[first], replay.start))
            for each in range(first, position):
                self._run_call(each)
            before = generator.get_state()
            result = self._run_call(position)
            after = generator.get_state()
        finally:
            generator.set_state(present_state)
        replay.states_after = {self._keys[position]: before, self.key(position): after}
        return result

    def _run_call(self, position: int) -> torch.Tensor:
        """Run the call on zeros of the recorded forms, from the generator's current state."""
        func, flat_forms, spec = self._calls[position]
        flat = [each.zeros() if isinstance(each, _Form) else each for each in flat_forms]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        result: torch.Tensor = func(*args, **kwargs)
        return result


@dataclass(frozen=True, eq=False)
class DrawnValue:
    """The result of a random call, as a function of its generator's state before the step."""

    draws: Draws
    position: int

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        return self.draws.result(self.position, state)


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the CPU's default generator and of this device's, by type of device."""
    found = {"cpu": torch.default_generator.get_state()}
    if device.type == "cuda" and torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found
