"""The cost of an operator that is a Python loop over chunks of rows: that of the operators in it.

The loop is run on fake tensors, on a few chunks only: every further chunk of equal size takes the
same time, and adds the same bytes to whatever has a row for each row of the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphs.costs.operators import Cost, OpCall
from graphs.costs.tracker import Tracker

_CHUNK_ROWS_AT = {
    "torch_nn::_linear_cross_entropy_batch_chunked": 8,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": 6,
}
"""Operators of `F.linear_cross_entropy` -> the position of their argument `batch_chunk_size`. Their
arguments 0 and 2, input and target, have the rows."""


@dataclass(frozen=True)
class RowLoop(ABC):
    """A function that handles some rows of its arguments at a time; may be the target of a call in
    an fx graph, whose generated code calls it by its `__name__`.

    row_inputs: positions of the arguments whose first dimension is the rows.
    """

    rows_per_chunk: int
    row_inputs: tuple[int, ...]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Handle all rows."""


@dataclass(frozen=True)
class _TorchsLoop(RowLoop):
    """An operator of PyTorch; body: the Python function that it calls."""

    body: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def row_loop(call: OpCall) -> RowLoop | None:
    """The call as a loop over rows; None where it is not known to be one."""
    if isinstance(call.target, RowLoop):
        return call.target
    name = getattr(call.packet, "_qualified_op_name", None)
    if name not in _CHUNK_ROWS_AT:
        return None
    body = torch._library.custom_ops.OPDEFS[name]._init_fn
    return _TorchsLoop(call.args[_CHUNK_ROWS_AT[name]], (0, 2), body)


def loop_cost(loop: RowLoop, call: OpCall, cost: Callable[[OpCall], Cost]) -> Cost:
    """Of the whole loop. cost: of a single operator."""
    n_rows, chunk_rows = call.args[loop.row_inputs[0]].shape[0], loop.rows_per_chunk
    few = 3 * chunk_rows + n_rows % chunk_rows  # the first chunk may allocate what others add to
    if n_rows <= few:
        return Cost(*_on_rows(loop, call, n_rows, cost))
    less, more = (_on_rows(loop, call, n, cost) for n in (few - chunk_rows, few))
    n_left = (n_rows - few) // chunk_rows
    time_s, workspace_bytes = (b + n_left * (b - a) for a, b in zip(less, more, strict=True))
    return Cost(time_s, int(workspace_bytes))


def _on_rows(
    loop: RowLoop, call: OpCall, n_rows: int, cost: Callable[[OpCall], Cost]
) -> tuple[float, int]:
    """Seconds and workspace bytes of the loop on fake tensors with so many rows."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        shape, strides = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        args = pytree.tree_map_only(torch.Tensor, fake, call.args)
        args = [arg[:n_rows] if at in loop.row_inputs else arg for at, arg in enumerate(args)]
        with Tracker(cost) as tracker:
            value = loop(*args, **call.kwargs)
        made_bytes = OpCall(call.target, tuple(args), call.kwargs, value).made_bytes()
    return tracker.time_s, max(0, tracker.peak_bytes - made_bytes)
