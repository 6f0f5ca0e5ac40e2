"""Results that a recomputation does not make, since nobody reads them.

`torch.utils.checkpoint` runs a module's code again. Selective checkpointing hands out the results
that were kept and runs every other operator, also those whose results go only into what was kept.
Those need not run. Their results are `Unread` here: shape, strides, type and device of the tensor
of the forward pass, and no memory. What is computed from them is unread too, as long as it is not
one of the kept results; reading the numbers of one is an error, so none can be wrong.

Two dispatch modes do that, above those of `create_selective_checkpoint_contexts`: one notes how the
results of the forward pass lie in memory, the other hands out what is unread.

Random operators are given the state of their generator in the forward pass, so that they draw the
same numbers whatever is left out before them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from graphs.model_calls import is_distributed_class
from scheduler_runtime.execute.copies import Form
from scheduler_runtime.execute.random_state import get_state, set_state

Asked = Callable[[Any], bool]
"""A question about the next call of an operator."""

Keep: TypeAlias = Literal["", "all", "part"]
"""Which results of a call to keep: none, all, or those that selective checkpointing cannot keep: of
an operator in place what it has written, of others all but the first."""


class UnreadResultError(RuntimeError):
    """A result was read that the plan says nobody reads: the module runs another program."""


class Unread(torch.Tensor):
    """A tensor without memory. value: what an operator in place has put into it, if one has."""

    value: torch.Tensor | None

    @staticmethod
    def __new__(cls, form: Form) -> Unread:
        made: Unread = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.strides,
            storage_offset=form.offset,
            dtype=form.dtype,
            device=form.device,
        )
        made.value = None
        return made

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # when autograd packs it
            (tensor,) = args
            return cls(Form.of(tensor)) if tensor.value is None else tensor.value.detach()
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
            # it reads no numbers, and what is put into it may be read
            f = call.results
            return torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device)
        return tree_map_only(Form, cls, call.results)


@dataclass(frozen=True)
class _Kept:
    """A result that was kept; nothing may write there again."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, *, in_place: bool) -> _Kept:
        # so that it has the same version counter
        with torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
            kept = tensor.detach()
        # autograd counts a write when the operator has returned to it
        return cls(kept, kept._version + in_place)

    def read(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a result that a checkpoint keeps has been overwritten since")
        return self.tensor


@dataclass(frozen=True)
class _Call:
    """results: of the operator, with a Form in the place of each tensor.
    state: of its generator, where it is random.
    kept: in place: what it has written; else all of its results but the first. () for others.
    whole: all results, with a _Kept in the place of each tensor, where all are kept, until they
        have been handed out."""

    results: Any
    state: torch.Tensor | None
    kept: tuple[_Kept, ...] = ()
    whole: Any = None


_running = threading.local()
"""call: the one whose results may be unread. is_skipped: whether nobody reads them."""


_Calls: TypeAlias = defaultdict[Any, list[_Call]]
"""Of one run of the forward pass, by operator."""


def skipping_contexts(
    *, keep: Callable[[Any], Keep], skip: Asked
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For one checkpointed call: modes of the forward pass and of its recomputation, to be entered
    after those of selective checkpointing.

    keep: asked in the forward pass, of each call.
    skip: asked in the recomputation: whether nobody reads the results.
    """
    calls: _Calls = defaultdict(list)
    return _Noting(calls, keep), _Skipping(calls, skip)


def _is_propagated() -> bool:
    """Whether operators run on tensors without memory now: DTensor finds placements like that, once
    for each kind of call."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None


def _is_taken_apart(kind: type) -> bool:
    """Whether tensors of this class call operators on this rank's parts, which is what is counted:
    DTensors, and results of collectives that have not been waited for."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    is_waited_for = module is not None and issubclass(kind, module.AsyncCollectiveTensor)
    return is_waited_for or is_distributed_class(kind)


class _Noting(TorchDispatchMode):
    def __init__(self, calls: _Calls, keep: Callable[[Any], Keep]) -> None:
        super().__init__()
        self._calls = calls
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_taken_apart, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS or _is_propagated():
            return func(*args, **kwargs)
        state = get_state(_device_of((args, kwargs))) if is_random(func) else None
        results = func(*args, **kwargs)
        kept: tuple[_Kept, ...] = ()
        which = self._keep(func)
        if which == "part":
            in_place = _is_in_place(func)
            tensors = (results,) if in_place else results[1:]
            kept = tuple(_Kept.of(tensor, in_place=in_place) for tensor in tensors)
        forms = tree_map_only(torch.Tensor, Form.of, results)
        whole = None
        if which == "all":
            whole = tree_map_only(torch.Tensor, lambda t: _Kept.of(t, in_place=False), results)
        self._calls[func].append(_Call(forms, state, kept, whole))
        return results


class _Skipping(TorchDispatchMode):
    def __init__(self, calls: _Calls, skip: Asked) -> None:
        super().__init__()
        self._calls = calls
        self._skip = skip
        self._seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_taken_apart, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS or _is_propagated():
            return func(*args, **kwargs)
        index = self._seen[func]
        self._seen[func] += 1
        call = self._calls[func][index]
        skip = self._skip(func) or bool(call.kept)  # asked of each call: it counts them
        if call.whole is not None:
            self._calls[func][index] = replace(call, whole=None)
            return tree_map_only(_Kept, _Kept.read, call.whole)
        given = args
        args, kwargs = tree_map_only(Unread, _value_of, (args, kwargs))
        place = given[0] if _is_in_place(func) else None
        # in place it runs where its argument is there: what is read later is the argument
        if place is None and skip:
            args = tree_map_only(torch.Tensor, lambda tensor: Unread(Form.of(tensor)), args)
        elif call.state is not None:
            set_state(call.state, _device_of((args, kwargs)))
        _running.call, _running.is_skipped = call, skip
        try:
            results = func(*args, **kwargs)
        finally:
            _running.call = None
        kept = tuple(each.read() for each in call.kept)
        if isinstance(place, Unread) and kept:
            (place.value,) = kept
        return (results[0], *kept) if place is None and kept else results


def _value_of(tensor: Unread) -> torch.Tensor:
    return tensor if tensor.value is None else tensor.value


def _is_in_place(func: Any) -> bool:
    name: str = func._schema.name
    return bool(func._schema.is_mutable) and name.endswith("_") and not name.endswith("__")


def is_random(func: Any) -> bool:
    """Whether the operator draws numbers. Fused attention on the CPU is tagged so, but refuses
    dropout, so it never does."""
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _device_of(values: Any) -> torch.device:
    """Where an operator with these arguments draws."""
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor | torch.device):
            return value if isinstance(value, torch.device) else value.device
    return torch.device("cpu")
