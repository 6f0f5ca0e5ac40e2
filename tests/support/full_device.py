"""Simulate a full device on the CPU: operators raise torch.OutOfMemoryError."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class FailingOperators(TorchDispatchMode):
    """Counts the operators that allocate tensors, and raises at those with the indices `at`."""

    def __init__(self, at: Collection[int] = ()) -> None:
        super().__init__()
        self.at = at
        self.names: list[str] = []
        self.n_raised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = _tensors((args, kwargs))
        # fake tensors are those of planning, which does not count
        is_real = given and not any(isinstance(each, FakeTensor) for each in given)
        if is_real and not (func.is_view or func._schema.is_mutable):
            self.names.append(str(func))
            if len(self.names) - 1 in self.at:
                self.n_raised += 1
                raise torch.OutOfMemoryError(f"operator {len(self.names) - 1}, {func}")
        return func(*args, **(kwargs or {}))


class SmallDevice(TorchDispatchMode):
    """A device with `capacity_bytes` for the tensors that operators make while this mode is active;
    raises when these are used up."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = self.n_errors = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._made:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {at: each for at, each in self._made.items() if not each[0].expired()}
        used_bytes = sum(n for _, n in self._made.values())
        if used_bytes > self.capacity_bytes:
            self.n_errors += 1
            raise torch.OutOfMemoryError(f"{used_bytes} bytes of {self.capacity_bytes} are used")
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        return result


def _tensors(items: Any) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(items) if isinstance(item, torch.Tensor)]
