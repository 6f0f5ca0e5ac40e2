"""The cost of a node that stands for many operators: what one real run of it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs.operators import OpCall


@dataclass(frozen=True)
class ObservedRun:
    """One real run. The target of such a node's call has it as its attribute `observed`.

    calls: its operators, on meta tensors; a roofline adds up their times.
    time_s: measured seconds.
    workspace_bytes: allocated beside inputs and outputs while it runs.
    """

    calls: tuple[OpCall, ...]
    time_s: float
    workspace_bytes: int


def observed_run(call: OpCall) -> ObservedRun | None:
    """What was observed of the call; None for an operator."""
    found = getattr(call.target, "observed", None)
    return found if isinstance(found, ObservedRun) else None


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run inside, views left out.

    communicates: whether a collective is among them.
    reads_values: whether the size of a result, or a number that Python gets, depends on values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OpCall] = []
        self.reads_values = False
        self.communicates = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        self.communicates |= func.namespace in ("c10d", "_c10d_functional")
        has_mask = call.packet in _INDEXING and any(
            t.dtype == torch.bool for t in call.inputs()[1:]
        )
        self.reads_values |= has_mask or not _VALUES.isdisjoint(func.tags)
        if (call.outputs() or call.mutated()) and not call.is_view():
            self.calls.append(_on_meta(call))
        return value


class ValueReads(TorchFunctionMode):
    """Whether tensors are handed to NumPy or become lists inside: no operator shows that.

    seen: whether one was.
    """

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= func in _HANDED_OVER
        return func(*args, **(kwargs or {}))


_HANDED_OVER = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _on_meta(call: OpCall) -> OpCall:
    """The call with tensors that take no memory; one that is there twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            like: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta"}
            if tensor.is_nested:  # the padded one
                sizes: torch.Tensor = tensor._nested_tensor_size()
                new = torch.empty(len(sizes), *sizes.amax(0).tolist(), **like)
            elif tensor.layout == torch.strided:
                new = torch.empty_strided(tensor.shape, tensor.stride(), **like)
            else:
                new = torch.empty(tensor.shape, **like)
            made[id(tensor)] = new
        return made[id(tensor)]

    parts = (call.args, dict(call.kwargs), call.value)
    args, kwargs, value = pytree.tree_map_only(torch.Tensor, meta, parts)
    return OpCall(target=call.target, args=args, kwargs=kwargs, value=value)
