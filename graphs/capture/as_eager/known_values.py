"""Values that are known while tracing: constants, and values of the batch and buffers.

A module may read values: is the attention mask all ones, how long is the longest sequence, how many
labels count. Fake tensors have none, but these values do not depend on parameters, so they can be
computed from the real batch. The traced branch is then the one that eager mode takes, and what was
read is kept as a `Guard`: a call with other values needs another program. Values that depend on
parameters are unknown, so `if hidden.sum() > 0` is refused. A condition on random numbers can be
read too, but not the numbers themselves (`drawn_values`).

Nothing is computed until a module reads a value: each fake tensor carries the recipe of its value.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from graphs.capture.as_eager.drawn_values import DrawnValue, Draws, Replay, key_of
from graphs.capture.as_eager.fake_kernels import correct_fake_result, cpu_kernel_result
from graphs.capture.as_eager.partly_written import (
    UNINITIALISED,
    PartlyWritten,
    after_call,
    outside_of_tracing,
)
from graphs.capture.refuse import ReadTensors, refuse_mixed_dtypes, refuse_writing_real_tensors
from graphs.costs import OpCall
from graphs.model_calls import is_distributed_class, storage_key, strided_like


@dataclass(frozen=True)
class Leaf:
    """A tensor whose values are known before the step.

    It is an input of the call ("input", its index), a buffer of the module ("buffer", its name), or
    the state of a random generator before the call ("random", the type of its device).
    """

    kind: str
    key: int | str


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to compute a value: one operator call, whose arguments may be recipes themselves.

    arguments: flat arguments, with leaves and recipes in place of tensors.
    spec: the structure of the arguments: (args, kwargs).
    index: which of the call's outputs the value is (None: its only output).
    inputs: the leaves and recipes among the arguments.
    leaves: all leaves that the value depends on.
    reads_constants: whether it depends on other real tensors, which may be written between calls.
    key: equal for recipes of the same value, if the value depends on nothing but states of
        generators; None: it depends on an input, a buffer or another tensor.
    """

    operator: Any
    arguments: tuple[Any, ...]
    spec: pytree.TreeSpec
    index: int | None
    inputs: tuple[Value, ...]
    leaves: frozenset[Leaf]
    reads_constants: bool = False
    key: bytes | None = None

    def output(self, index: int) -> Recipe:
        """The recipe of one of several outputs."""
        key = None if self.key is None else key_of(self.key, index)
        return dataclasses.replace(self, index=index, key=key)

    @property
    def is_of_model(self) -> bool:
        """Whether it depends on constants and buffers alone."""
        return all(leaf.kind == "buffer" for leaf in self.leaves) and not self.reads_constants

    @property
    def is_chance(self) -> bool:
        """Whether it depends on random numbers."""
        return any(leaf.kind == "random" for leaf in self.leaves)


Value: TypeAlias = Leaf | Recipe


@dataclass(frozen=True)
class Guard:
    """What a module read: a value, or the shapes of tensors whose sizes depend on values.

    recipe: how to compute it.
    seen: what was read when the step was traced.
    """

    recipe: Recipe
    seen: Any

    def holds(self, leaves: Mapping[Leaf, torch.Tensor]) -> bool:
        """Whether a call with these leaves would read the same."""
        return _are_equal(_values_and_shapes(evaluate(self.recipe, leaves)), self.seen)

    def described(self) -> dict[str, Any]:
        """As JSON: the leaves that the value depends on, and what was read."""
        leaves = sorted([leaf.kind, leaf.key] for leaf in self.recipe.leaves)
        return {"of": leaves, "seen": str(self.seen)}


class ReadsRandomNumbers(DataDependentOutputException):
    """The module reads random numbers themselves, not only a condition on them."""


class KnowingMode(FakeTensorMode):
    """A fake tensor mode whose tensors carry the recipes of their values, if known.

    leaves: the real tensors that fake ones stand for.
    parameters: id of each of the module's parameters -> its name, for messages.
    as_read: what an earlier trace of the call has read, in order (`reads`). Outside of a trace,
        which has no operators in place, a value that was written in place would be unknown.
    reads: what the module has read, in order.
    guards: the same, with what was read, unless it is the same in every call.
    read_tensors: the real tensors that operators have read.
    """

    def __init__(
        self,
        leaves: Mapping[Leaf, torch.Tensor],
        parameters: Mapping[int, str] | None = None,
        *,
        as_read: Sequence[Recipe] = (),
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.leaves = leaves
        self._as_read = tuple(as_read)
        self.reads: list[Recipe] = []
        self.guards: list[Guard] = []
        self.read_tensors = ReadTensors(parameters or {})
        self._written: set[int] = set()  # addresses of live storages written in place
        self._draws: dict[str, Draws] = {}  # by type of device

    def begin_call(self) -> None:
        """Forget what an earlier call has read and drawn: a trace calls the module repeatedly."""
        self.reads.clear()
        self.guards.clear()
        self._draws.clear()

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(map(is_distributed_class, types)):  # the operators of its parts come next
            return NotImplemented
        if func is torch.ops.prim.device.default and isinstance(args[0], FunctionalTensor):
            return args[0].elem.device
        kwargs = kwargs or {}
        self.read_tensors.note(func, (*args, *kwargs.values()))
        call = OpCall(func, tuple(args), kwargs, None)
        written = call.mutated()
        refuse_writing_real_tensors(written)
        refuse_mixed_dtypes(func, args, kwargs)
        held = self._recipe(func, args, kwargs)
        recipe = held if isinstance(held, Recipe) else None
        is_read = call.reads_values()
        if is_read and recipe is None:
            as_read = self._as_read[len(self.reads) :][:1]
            recipe = next((each for each in as_read if each.operator is func), None)
        if recipe is not None and is_read:
            self.reads.append(recipe)
            is_value = torch.Tag.data_dependent_output in func.tags
            # Of random numbers only a boolean may be read, as by an `if`: a number would be another
            # one in each step, and each would need a program of its own.
            is_bool = bool(args) and getattr(args[0], "dtype", None) == torch.bool
            if recipe.is_chance and not (is_value and is_bool):
                raise ReadsRandomNumbers(func)
            result = evaluate(recipe, self.leaves)
            if recipe.leaves or recipe.reads_constants:
                self.guards.append(Guard(recipe, _values_and_shapes(result)))
            if is_value:
                return result
            with self:
                result = pytree.tree_map_only(torch.Tensor, strided_like, result)
            return _with_recipe(result, recipe)
        result = cpu_kernel_result(self, func, args, kwargs)
        if result is NotImplemented:
            result = super().dispatch(func, types, args, kwargs)
            result = correct_fake_result(func, args, kwargs, result)
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._written:
                self._written.add(storage._cdata)
                finalizer = weakref.finalize(storage, self._written.discard, storage._cdata)
                finalizer.atexit = False
        if held is not None and not func._schema.is_mutable:
            _with_recipe(result, held)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_random_call(func, args, kwargs, result)
        return result

    def set_leaf(self, tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        """Declare that the fake tensor stands for a real one, and return it."""
        if leaf in self.leaves:
            tensor.__dict__[_ATTRIBUTE] = leaf
        return tensor

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The recipe of the tensor's value; None if the value is unknown."""
        held = self._held(tensor)
        return None if isinstance(held, PartlyWritten) else held

    def _held(self, tensor: torch.Tensor) -> Value | PartlyWritten | None:
        if not isinstance(tensor, FakeTensor):
            return _constant_recipe(tensor) if type(tensor) is torch.Tensor else None
        if self._written and storage_key(tensor) in self._written:
            return None
        held: Value | PartlyWritten | None = tensor.__dict__.get(_ATTRIBUTE)
        return held

    def _recipe(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Recipe | PartlyWritten | None:
        """The recipe of the call's result; None if an argument is unknown or the call is random."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        values = (*args, *kwargs.values())
        if any(isinstance(item, FakeTensor) and self._held(item) is None for item in values):
            return None  # decides most calls without flattening their arguments
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        inputs: list[Value] = []
        partly: PartlyWritten | None = None
        for position, item in enumerate(flat):
            if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Generator):
                return None
            if isinstance(item, torch.Tensor):
                value = self._held(item)
                if isinstance(value, PartlyWritten):
                    partly, value = value, value.recipe if position == 0 else None
                if value is None:
                    return None
                flat[position] = value
                inputs.append(value)
        leaves = [{value} if isinstance(value, Leaf) else value.leaves for value in inputs]
        keys = [value.key if isinstance(value, Recipe) else value for value in flat]
        has_key = not any(isinstance(value, Leaf) or value.key is None for value in inputs)
        key = key_of(func, keys, spec) if has_key else None
        recipe = Recipe(
            func,
            tuple(flat),
            spec,
            None,
            tuple(inputs),
            frozenset().union(*leaves),
            any(isinstance(value, Recipe) and value.reads_constants for value in inputs),
            key,
        )
        if func in UNINITIALISED:
            return PartlyWritten(recipe)
        return recipe if partly is None else after_call(func, args, partly, recipe)

    def _note_random_call(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        """Record a random call, and attach a recipe to its result if that can be computed."""
        tensors = [item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
        if not tensors or any(isinstance(item, torch.Generator) for item in kwargs.values()):
            return
        device = tensors[0].device
        leaf = Leaf("random", device.type)
        if leaf not in self.leaves:
            return
        draws = self._draws.setdefault(device.type, Draws(device))
        position = draws.note(func, args, kwargs)
        if position is None or func._schema.is_mutable or not isinstance(result, FakeTensor):
            return
        arguments, spec = pytree.tree_flatten(((leaf,), {}))
        drawn_value = DrawnValue(draws, position)
        leaves, key = frozenset((leaf,)), draws.key(position)
        recipe = Recipe(drawn_value, tuple(arguments), spec, None, (leaf,), leaves, key=key)
        _with_recipe(result, recipe)


_ATTRIBUTE = "_known_value"


def is_unknown(tensor: object) -> bool:
    """Whether this is a tensor of a trace whose value is unknown, or depends on random numbers."""
    if isinstance(tensor, FunctionalTensor):
        torch._functionalize_sync(tensor.elem)
        tensor = torch._from_functional_tensor(tensor.elem)
    if not isinstance(tensor, FakeTensor):
        return False
    mode = tensor.fake_mode
    value = mode.value_of(tensor) if isinstance(mode, KnowingMode) else None
    return value is None or (isinstance(value, Recipe) and value.is_chance)


def evaluate(recipe: Recipe, leaves: Mapping[Leaf, torch.Tensor]) -> Any:
    """Compute a recipe's value on real tensors, outside of all tracing."""
    values: dict[Value, Any] = {leaf: leaves[leaf] for leaf in recipe.leaves}
    # Device arguments are replaced by the device of the tensors: the model may be traced for
    # another one, such as an absent card. Leaves of kind "random" cannot tell the device, since the
    # state of a CUDA generator is on the host.
    fallback = None if torch.cuda.is_available() else torch.device("cpu")
    devices = (leaves[leaf].device for leaf in recipe.leaves if leaf.kind != "random")
    device = next(devices, fallback)
    with outside_of_tracing():
        # Values that depend on the state of one generator alone are kept for other programs.
        replay = Replay(torch.empty(0))
        if recipe.key is not None and len(recipe.leaves) == 1:
            (leaf,) = recipe.leaves
            replay = Replay.of(str(leaf.key), leaves[leaf])
        for each in _topological_order(recipe, replay.values):
            if each.key in replay.values:
                values[each] = replay.values[each.key]
                continue
            flat = [
                values[item]
                if isinstance(item, Leaf | Recipe)
                else device
                if isinstance(item, torch.device) and device is not None
                else item
                for item in each.arguments
            ]
            args, kwargs = pytree.tree_unflatten(flat, each.spec)
            result = each.operator(*args, **kwargs)
            values[each] = result if each.index is None else result[each.index]
            if each.key is not None and each.is_chance:
                replay.keep(each.key, values[each])
    return values[recipe]


def _topological_order(recipe: Recipe, known_keys: Container[bytes | None]) -> Iterator[Recipe]:
    """The recipe and all recipes that it depends on, in topological order, without recursion.

    known_keys: keys of recipes whose values are known; the recipes that these depend on are left
        out.
    """
    done: set[Recipe] = set()
    stack: list[Recipe] = [recipe]
    while stack:
        each = stack[-1]
        inputs = () if each.key in known_keys else each.inputs
        missing = [i for i in inputs if isinstance(i, Recipe) and i not in done]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if each not in done:
            done.add(each)
            yield each


def _values_and_shapes(result: Any) -> Any:
    """What a guard compares: numbers themselves, and the shapes of tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), result)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether both are equal, NaN equal to NaN."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other) or bool(one != one and other != other)


def _constant_recipe(tensor: torch.Tensor) -> Recipe:
    """The recipe of a real tensor that the module holds or creates (torch.tensor(3.0))."""
    return Recipe(lambda: tensor, (), _NO_ARGUMENTS, None, (), frozenset(), reads_constants=True)


_NO_ARGUMENTS = pytree.tree_flatten(((), {}))[1]


def _with_recipe(result: Any, recipe: Recipe | PartlyWritten) -> Any:
    """Attach the recipe to each fake tensor of the result."""
    if isinstance(result, FakeTensor):
        result.__dict__[_ATTRIBUTE] = recipe
    elif isinstance(result, list | tuple) and isinstance(recipe, Recipe):
        for index, item in enumerate(result):
            if isinstance(item, FakeTensor):
                item.__dict__[_ATTRIBUTE] = recipe.output(index)
    return result
