"""Seconds and peak bytes of Python code, from the operators that it calls on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs.operators import Cost, OpCall
from graphs.model_calls import storage_key


class Tracker(TorchDispatchMode):
    """Tracks the bytes that are allocated and not yet freed, and sums the seconds of operators.

    cost: gives the cost of an operator.
    peak_bytes: the most that was allocated at once, including the operators' workspace.
    time_s: the sum over the operators so far.
    """

    def __init__(self, cost: Callable[[OpCall], Cost]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.time_s = 0.0
        self._taken_bytes = 0
        self._cost = cost

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        if not call.outputs() and not call.mutated():
            return value  # it queries a property, such as prim.device
        known = {storage_key(item) for item in call.inputs()}
        for item in call.outputs():
            storage = item.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._taken_bytes += storage.nbytes()
                weakref.finalize(storage, self._count_freed, storage.nbytes()).atexit = False
        cost = self._cost(call)
        self.time_s += cost.time_s
        self.peak_bytes = max(self.peak_bytes, self._taken_bytes + cost.workspace_bytes)
        return value

    def _count_freed(self, n_bytes: int) -> None:
        self._taken_bytes -= n_bytes
