"""Random numbers that a forward pass branches on, as values of the generator's state.

LayerDrop draws a number for each layer, and skips the layer `if` it is small. That number follows
from the state that the generator is in before the call, and from the random operators that run
before it: what they take from the generator depends on the form of their arguments alone. So the
branch is known before a step without the step: these operators run, on arguments of the same form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

_OWN = ("dropout_noise", "bernoulli_fill", "normal_fill", "random_fill")
_OF_FORM_ALONE = {f"checkpoint_solver::{name}" for name in _OWN} | {
    f"aten::{name}"
    for name in (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "bernoulli_", "native_dropout", "uniform", "uniform_", "random", "random_"),
        *("normal", "normal_", "normal_functional", "exponential", "exponential_"),
    )
}
"""Operators that draw as many numbers whatever the values of their arguments are, but for one."""


_OF_VALUES = (
    torch.ops.aten.bernoulli.default,
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.normal.Tensor_float,
    torch.ops.aten.normal.float_Tensor,
)
"""Among these, what they return depends on the values of their only tensor as well."""


FEW_BYTES = 512
"""Of a value that is kept for other programs; no plan counts them."""


@dataclass(frozen=True)
class _Form:
    """Stands for a tensor argument."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return made.zero_()


class Replay:
    """What follows from one state of a generator, for all programs that ask in this state.

    Programs of one module begin with the same random calls, so each call is made once, and a step
    draws again what its own program draws, however many programs there are.

    values: by their keys, up to `FEW_BYTES` each.
    reached: states of the generator, by the key of the calls that lead there: before and after the
        last call whose result was asked for. A state takes kilobytes, so there are no more.
    """

    _last: ClassVar[dict[str, Replay]] = {}  # by the type of the device

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start
        self.values: dict[bytes, Any] = {}
        self.reached: dict[bytes, torch.Tensor] = {}

    @classmethod
    def of(cls, device: str, state: torch.Tensor) -> Replay:
        """The one of this state; it is forgotten when another state comes."""
        last = cls._last.get(device)
        if last is None or not torch.equal(last.start, state):
            last = cls._last[device] = cls(state.clone())
        return last

    def keep(self, key: bytes, value: Any) -> None:
        """Large results are handed out only, for a plan does not count them."""
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        if all(each.untyped_storage().nbytes() <= FEW_BYTES for each in tensors):
            self.values[key] = value


def key_of(*items: Any) -> bytes:
    """Of plain values, dtypes, devices, operators and keys: the same for equal ones."""
    return hashlib.sha256(repr(items).encode()).digest()


class Draws:
    """The random calls of one trace on one device, in order.

    known: whether nothing else has drawn from the generator so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = True
        self._calls: list[tuple[Any, list[Any], pytree.TreeSpec]] = []
        self._keys = [key_of(device, torch.get_default_dtype())]  # of the first 0, 1, ... calls

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """A call is made; its position, or None where what it returns cannot be known."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in ("dropout_p", "draws"):
                given = args[position] if position < len(args) else argument.default_value
                if not kwargs.get(argument.name, given):
                    return None  # attention without dropout, an opaque part that drew none
        # With a tensor for `high`, the range decides between 32 and 64 bits for each number.
        name, arguments = func._schema.name, func._schema.arguments
        n_tensors = sum(isinstance(each.type, torch.TensorType) for each in arguments)
        is_of_range = name == "aten::randint_like" and n_tensors > 1
        self.known &= name in _OF_FORM_ALONE and not is_of_range
        if not self.known:
            return None
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        formed = [
            _Form(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t
            for t in flat
        ]
        self._calls.append((func, formed, spec))
        self._keys.append(key_of(self._keys[-1], func, formed, spec))
        # The values of a second tensor (the probabilities of `bernoulli_`, a deviation) are read.
        returns_by_form = func not in _OF_VALUES and n_tensors <= 1
        return len(self._calls) - 1 if returns_by_form else None

    def key(self, position: int) -> bytes:
        """Equal for calls that return the same in the same state."""
        return self._keys[position + 1]

    def result(self, position: int, state: torch.Tensor) -> torch.Tensor:
        """What the call at this position returns where the generator starts in this state."""
        replay, key = Replay.of(self.device.type, state), self.key(position)
        if key in replay.values:
            return replay.values[key]  # type: ignore[no-any-return]
        result = self._drawn(position, replay)
        replay.keep(key, result)
        return result

    def _drawn(self, position: int, replay: Replay) -> torch.Tensor:
        """Made anew, from the last state that is known on the way there."""
        known = (n for n in range(position, 0, -1) if self._keys[n] in replay.reached)
        first = next(known, 0)
        generator = torch.default_generator
        if self.device.type == "cuda":  # torch's functions that set its state are refused here
            generator = torch.cuda.default_generators[self.device.index or 0]
        now = generator.get_state()
        try:
            generator.set_state(replay.reached.get(self._keys[first], replay.start))
            for each in range(first, position):
                self._made(each)
            before = generator.get_state()
            result = self._made(position)
            after = generator.get_state()
        finally:
            generator.set_state(now)
        replay.reached = {self._keys[position]: before, self.key(position): after}
        return result

    def _made(self, position: int) -> torch.Tensor:
        func, formed, spec = self._calls[position]
        flat = [each.made() if isinstance(each, _Form) else each for each in formed]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        result: torch.Tensor = func(*args, **kwargs)
        return result


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a random call returns, as a function of the state of its generator before the step."""

    draws: Draws
    position: int

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        return self.draws.result(self.position, state)


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """By the type of the device: of the CPU's generator, and of this device's."""
    found = {"cpu": torch.default_generator.get_state()}
    if device.type == "cuda" and torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found
