"""The cost of an operator that is a Python loop over chunks of rows, from the operators it calls.

The loop runs on fake tensors, over a few chunks only. Every further chunk of the same size takes
the same time, and adds the same number of bytes to tensors that have one row per input row.
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
from graphs.model_calls import strided_like

_CHUNK_ROWS_AT = {
    "torch_nn::_linear_cross_entropy_batch_chunked": 8,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": 6,
}
"""Operators of `F.linear_cross_entropy` -> the position of their argument `batch_chunk_size`. The
loop goes over the rows of their arguments 0 and 2, input and target."""


@dataclass(frozen=True)
class RowLoop(ABC):
    """A function that handles its arguments in chunks of rows. It may be the target of an fx node;
    the generated code calls it by its `__name__`.

    rows_per_chunk: rows that are handled at a time.
    row_inputs: positions of the arguments whose first dimension is the rows.
    """

    rows_per_chunk: int
    row_inputs: tuple[int, ...]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Handle all rows."""


@dataclass(frozen=True)
class _PyTorchLoop(RowLoop):
    """An operator of PyTorch; body: the Python function that it calls."""

    body: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def row_loop(call: OpCall) -> RowLoop | None:
    """The loop over rows that this call runs; None if it is not known to run one."""
    if isinstance(call.target, RowLoop):
        return call.target
    name = getattr(call.packet, "_qualified_op_name", None)
    if name not in _CHUNK_ROWS_AT:
        return None
    body = torch._library.custom_ops.OPDEFS[name]._init_fn
    return _PyTorchLoop(call.args[_CHUNK_ROWS_AT[name]], (0, 2), body)


def loop_cost(loop: RowLoop, call: OpCall, cost: Callable[[OpCall], Cost]) -> Cost:
    """The cost of the whole loop.

    cost: gives the cost of a single operator.
    """
    # Runs with two and with three whole chunks; their difference is the cost of every further one.
    # The first chunk differs: it may allocate tensors that the others add to.
    n_rows, chunk_rows = call.args[loop.row_inputs[0]].shape[0], loop.rows_per_chunk
    n_sampled_rows = 3 * chunk_rows + n_rows % chunk_rows
    if n_rows <= n_sampled_rows:
        return Cost(*_cost_on_rows(loop, call, n_rows, cost))
    less, more = (
        _cost_on_rows(loop, call, n, cost) for n in (n_sampled_rows - chunk_rows, n_sampled_rows)
    )
    n_left = (n_rows - n_sampled_rows) // chunk_rows
    time_s, workspace_bytes = (b + n_left * (b - a) for a, b in zip(less, more, strict=True))
    return Cost(time_s, int(workspace_bytes))


def _cost_on_rows(
    loop: RowLoop, call: OpCall, n_rows: int, cost: Callable[[OpCall], Cost]
) -> tuple[float, int]:
    """Seconds and workspace bytes of the loop on fake tensors with this number of rows."""
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        args = pytree.tree_map_only(torch.Tensor, strided_like, call.args)
        args = [arg[:n_rows] if at in loop.row_inputs else arg for at, arg in enumerate(args)]
        with Tracker(cost) as tracker:
            value = loop(*args, **call.kwargs)
        made_bytes = OpCall(call.target, tuple(args), call.kwargs, value).made_bytes()
    return tracker.time_s, max(0, tracker.peak_bytes - made_bytes)
