"""Skip operators in a recomputation whose results nobody reads.

`torch.utils.checkpoint` runs a module's code again. Selective checkpointing returns the results
that were kept and runs every other operator, also those whose results are only inputs of kept ones.
These need not run. Here their results are `Unread` tensors: with the shape, strides, dtype and
device of the forward pass, but without memory. Results that are computed from them are unread too,
unless they were kept. Reading the values of an unread tensor is an error, so no result can be
wrong.

Two dispatch modes do that, on top of those of `create_selective_checkpoint_contexts`. One records
the memory layout of results in the forward pass, the other returns unread tensors in the
recomputation.

Calls of views are not counted. They allocate nothing, and there are more of them if a tensor is
unread: when a slice of it is assigned, autograd makes the view again.

Random operators get the generator state that they had in the forward pass, so they draw the same
numbers, whichever operators before them are skipped.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from graphs.capture import may_be_random
from graphs.model_calls import is_distributed_class
from scheduler_runtime.execute.copies import TensorSpec
from scheduler_runtime.execute.random_state import get_state, set_state

CallPredicate = Callable[[Any], bool]
"""Answers a yes-or-no question about the next call of an operator."""

Keep: TypeAlias = Literal["", "all", "part"]
"""Which results of a call to keep: "" none, "all" all, "part" those that selective checkpointing
cannot keep: what an in-place operator has written, or all results but the first of another one."""


class UnreadResultError(RuntimeError):
    """A result was read although nobody reads it by the plan: the module runs another program."""


class Unread(torch.Tensor):
    """A tensor without memory. value: what an in-place operator has written to it, if one has."""

    value: torch.Tensor | None

    @staticmethod
    def __new__(cls, spec: TensorSpec) -> Unread:
        tensor: Unread = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            strides=spec.strides,
            storage_offset=spec.offset,
            dtype=spec.dtype,
            device=spec.device,
        )
        tensor.value = None
        return tensor

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # when autograd packs it
            (tensor,) = args
            return cls(TensorSpec.of(tensor)) if tensor.value is None else tensor.value.detach()
        args, kwargs = tree_map_only(Unread, _value_of, (args, kwargs or {}))
        if not any(isinstance(each, Unread) for each in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        call: _Call | None = getattr(_running, "call", None)
        written = args[0] if _is_in_place(func) else None
        if call is None or (written is not None and not isinstance(written, Unread)):
            raise UnreadResultError(
                f"{func} reads a result that no backward operator of the plan reads: this call "
                "runs a different program; remove() the export and solve again with this batch"
            )
        if written is not None:
            return written
        if func is torch.ops.aten.empty_like.default and not _running.is_skipped:
            # it reads no values, and what is written to its result later may be read
            f = call.results
            return torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device)
        return tree_map_only(TensorSpec, cls, call.results)


@dataclass(frozen=True)
class _KeptResult:
    """A result that was kept, and its version then: it must not be written again."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, *, in_place: bool) -> _KeptResult:
        # with this key, the detached tensor shares the version counter
        with torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
            kept = tensor.detach()
        # of an in-place operator, autograd counts the write after this mode has returned
        return cls(kept, kept._version + in_place)

    def read(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a result that a checkpoint keeps has been overwritten since")
        return self.tensor


@dataclass(frozen=True)
class _Call:
    """A call of an operator in the forward pass.

    results: its results, with a TensorSpec in the place of each tensor.
    state: the generator's state before the call, if the operator is random.
    part_kept: if a part of the results is kept: what an in-place operator has written, or all
        results but the first of another one. Else ().
    all_kept: if all results are kept: these, with a _KeptResult in the place of each tensor, until
        they have been returned in the recomputation."""

    results: Any
    state: torch.Tensor | None
    part_kept: tuple[_KeptResult, ...] = ()
    all_kept: Any = None


_running = threading.local()
"""call: the running call, whose results may be unread. is_skipped: whether nobody reads them."""


@dataclass(frozen=True)
class _Calls:
    """The calls of one forward pass.

    of: operator -> its calls, in order.
    comparisons: all calls of the operators in _MIRRORED, in order.
    """

    of: defaultdict[Any, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    comparisons: list[Any] = field(default_factory=list)


_aten = torch.ops.aten
_MIRRORED = {
    _aten.lt.Tensor: _aten.gt.Tensor,
    _aten.gt.Tensor: _aten.lt.Tensor,
    _aten.le.Tensor: _aten.ge.Tensor,
    _aten.ge.Tensor: _aten.le.Tensor,
}
"""Comparison -> the one that Python calls instead, with the arguments swapped, if the class of the
second argument (`Unread`) derives from that of the first."""


def skipping_contexts(
    *, keep: Callable[[Any], Keep], skip: CallPredicate
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The dispatch modes of the forward pass and of the recomputation, for one checkpointed call.

    They must be entered after those of selective checkpointing.

    keep: called for each call in the forward pass: which results to keep.
    skip: called for each call in the recomputation: whether nobody reads its results.
    """
    calls = _Calls()
    return _RecordingMode(calls, keep), _SkippingMode(calls, skip)


def _is_faking() -> bool:
    """Whether operators run on fake tensors now, as DTensor does once for each kind of call to find
    placements; such calls do not count."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None


@functools.cache
def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(each.alias_info is not None for each in schema.returns)


def _is_not_counted(func: Any) -> bool:
    return func in SAC_IGNORED_OPS or _is_view(func) or _is_faking()


def _view_without_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a view of unread tensors, whose form follows from theirs."""
    device = _device_of((args, kwargs))

    def without_memory(tensor: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(0, dtype=tensor.dtype, device="meta")
        return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def unread(tensor: torch.Tensor) -> Unread:
        return Unread(replace(TensorSpec.of(tensor), device=device))

    with _disable_current_modes():  # which would count these calls
        args, kwargs = tree_map_only(torch.Tensor, without_memory, (args, kwargs))
        return tree_map_only(torch.Tensor, unread, func(*args, **kwargs))


def _runs_on_local_parts(kind: type) -> bool:
    """Whether tensors of this class run operators on this rank's local parts: DTensors, and results
    of collectives that have not been waited for. The calls on the parts are counted instead."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    is_waited_for = module is not None and issubclass(kind, module.AsyncCollectiveTensor)
    return is_waited_for or is_distributed_class(kind)


class _RecordingMode(TorchDispatchMode):
    def __init__(self, calls: _Calls, keep: Callable[[Any], Keep]) -> None:
        super().__init__()
        self._calls = calls
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_runs_on_local_parts, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if _is_not_counted(func):
            return func(*args, **kwargs)
        state = get_state(_device_of((args, kwargs))) if may_be_random(func) else None
        results = func(*args, **kwargs)
        kept: tuple[_KeptResult, ...] = ()
        which = self._keep(func)
        if which == "part":
            in_place = _is_in_place(func)
            tensors = (results,) if in_place else results[1:]
            kept = tuple(_KeptResult.of(tensor, in_place=in_place) for tensor in tensors)
        specs = tree_map_only(torch.Tensor, TensorSpec.of, results)
        all_kept = None
        if which == "all":
            all_kept = tree_map_only(
                torch.Tensor, lambda t: _KeptResult.of(t, in_place=False), results
            )
        self._calls.of[func].append(_Call(specs, state, kept, all_kept))
        if func in _MIRRORED:
            self._calls.comparisons.append(func)
        return results


class _SkippingMode(TorchDispatchMode):
    def __init__(self, calls: _Calls, skip: CallPredicate) -> None:
        super().__init__()
        self._calls = calls
        self._skip = skip
        self._seen: Counter[Any] = Counter()
        self._n_comparisons = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_runs_on_local_parts, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if _is_view(func):
            args, kwargs = tree_map_only(Unread, _value_of, (args, kwargs))
            if any(isinstance(each, Unread) for each in tree_iter((args, kwargs))):
                return _view_without_memory(func, args, kwargs)  # which the mode below would count
        if _is_not_counted(func):
            return func(*args, **kwargs)
        func, args = self._as_in_forward(func, args)
        index = self._seen[func]
        self._seen[func] += 1
        if index == len(self._calls.of[func]):
            raise UnreadResultError(
                f"a recomputation calls {func} more often than the forward pass did ({index} "
                "times): what the module runs depends on something that has changed since"
            )
        call = self._calls.of[func][index]
        # always call `_skip`, which counts the calls
        skip = self._skip(func) or bool(call.part_kept)
        if call.all_kept is not None:
            self._calls.of[func][index] = replace(call, all_kept=None)
            return tree_map_only(_KeptResult, _KeptResult.read, call.all_kept)
        given = args
        args, kwargs = tree_map_only(Unread, _value_of, (args, kwargs))
        target = given[0] if _is_in_place(func) else None
        # an in-place operator runs if its argument is there: it is the argument that is read later
        if target is None and skip:
            args = tree_map_only(torch.Tensor, lambda tensor: Unread(TensorSpec.of(tensor)), args)
        elif call.state is not None:
            set_state(call.state, _device_of((args, kwargs)))
        _running.call, _running.is_skipped = call, skip
        try:
            results = func(*args, **kwargs)
        finally:
            _running.call = None
        kept = tuple(each.read() for each in call.part_kept)
        if isinstance(target, Unread) and kept:
            (target.value,) = kept
        return (results[0], *kept) if target is None and kept else results

    def _as_in_forward(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The comparison that the module calls, if Python has mirrored it (`_MIRRORED`)."""
        if func not in _MIRRORED:
            return func, args
        recorded = self._calls.comparisons[self._n_comparisons :][:1]
        self._n_comparisons += 1
        is_mirrored = isinstance(args[0], Unread) and recorded == [_MIRRORED[func]]
        return (_MIRRORED[func], args[::-1]) if is_mirrored else (func, args)


def _value_of(tensor: Unread) -> torch.Tensor:
    return tensor if tensor.value is None else tensor.value


def _is_in_place(func: Any) -> bool:
    name: str = func._schema.name
    return bool(func._schema.is_mutable) and name.endswith("_") and not name.endswith("__")


def _device_of(values: Any) -> torch.device:
    """The device on which an operator with these arguments draws random numbers."""
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor | torch.device):
            return value if isinstance(value, torch.device) else value.device
    return torch.device("cpu")
