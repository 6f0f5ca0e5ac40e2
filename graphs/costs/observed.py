"""The cost of a node that runs many operators, as observed in one real run of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs.operators import OpCall
from graphs.model_calls import strided_like


@dataclass(frozen=True)
class ObservedRun:
    """One real run of a node's function, which has it as its attribute `observed`.

    calls: the operators that ran, with meta tensors as arguments; a roofline adds up their times.
    time_s: measured seconds.
    workspace_bytes: bytes allocated besides inputs and outputs during the run.
    """

    calls: tuple[OpCall, ...]
    time_s: float
    workspace_bytes: int


def observed_run(call: OpCall) -> ObservedRun | None:
    """The observed run of the call's target; None for an ordinary operator."""
    found = getattr(call.target, "observed", None)
    return found if isinstance(found, ObservedRun) else None


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that are dispatched while the mode is active, except views.

    calls: these operators, with meta tensors as arguments.
    communicates: whether a collective was among them.
    reads_values: whether the shape of a result, or a number returned to Python (`.item()`),
        depended on a tensor's values.
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
        has_mask = call.packet in _INDEXED_WRITES and any(
            t.dtype == torch.bool for t in call.inputs()[1:]
        )
        self.reads_values |= has_mask or call.reads_values()
        if (call.outputs() or call.mutated()) and not call.is_view():
            self.calls.append(_with_meta_tensors(call))
        return value


class ValueReads(TorchFunctionMode):
    """A mode that notices tensors whose values leave PyTorch, as NumPy arrays or lists.

    No operator call shows that.

    seen: whether there was one.
    """

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= func in _READS_VALUES
        return func(*args, **(kwargs or {}))


_READS_VALUES = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_INDEXED_WRITES = (torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _with_meta_tensors(call: OpCall) -> OpCall:
    """The call with meta tensors, which take no memory. A tensor that occurs twice stays one."""
    meta_by_id: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in meta_by_id:
            options: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta"}
            if tensor.is_nested:  # take the padded tensor instead
                sizes: torch.Tensor = tensor._nested_tensor_size()
                new = torch.empty(len(sizes), *sizes.amax(0).tolist(), **options)
            elif tensor.layout == torch.strided:
                new = strided_like(tensor, "meta")
            else:
                new = torch.empty(tensor.shape, **options)
            meta_by_id[id(tensor)] = new
        return meta_by_id[id(tensor)]

    parts = (call.args, dict(call.kwargs), call.value)
    args, kwargs, value = pytree.tree_map_only(torch.Tensor, meta, parts)
    return OpCall(target=call.target, args=args, kwargs=kwargs, value=value)
