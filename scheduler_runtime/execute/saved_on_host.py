"""Keep some saved tensors on the host in eager mode, with PyTorch's saved-tensor hooks.

A dispatch mode recognises the planned storages by the operator calls that make them in the forward
pass. What autograd saves of these is copied to the host at once, and back when a backward function
reads it, unless another backward function still holds such a copy. Each copy blocks the
computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler_runtime.execute.copies import TensorSpec
from scheduler_runtime.execute.copy_streams import host_memory, storage_bytes
from scheduler_runtime.execute.torch_checkpoint import (
    ExportedForward,
    check_counts,
    functional_name,
)


@dataclass(frozen=True)
class CallsOnHost:
    """Which results of operator calls are kept on the host.

    results: operator -> index of the call, counted from 0 in each forward -> indices of results.
    n_calls: operator -> number of calls in a forward.
    """

    results: Mapping[str, Mapping[int, frozenset[int]]]
    n_calls: Mapping[str, int]


@dataclass(eq=False)
class _HostCopy:
    """A storage on the host, and its copy on the device while a backward function holds it."""

    host: torch.Tensor
    device_storage: StorageWeakRef | None = None

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """The storage on the device: the copy that is still there, or a new one."""
        if self.device_storage is not None:
            found = torch.UntypedStorage._new_with_weak_ptr(self.device_storage.cdata)
            if found is not None:
                return found
        storage = self.host.to(device, copy=True).untyped_storage()
        self.device_storage = StorageWeakRef(storage)
        return storage


class _MarkingMode(TorchDispatchMode):
    """Notes the storages that the planned calls of one forward pass make.

    seen: operator -> calls so far.
    """

    def __init__(self, planned: CallsOnHost) -> None:
        super().__init__()
        self._planned = planned
        self.seen: Counter[str] = Counter()
        # the references keep addresses from being reused
        self._planned_storages: dict[int, StorageWeakRef] = {}
        self._host_copies: dict[tuple[int, int], _HostCopy] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = functional_name(str(func))
        if name in self._planned.n_calls:
            wanted = self._planned.results.get(name, {}).get(self.seen[name], ())
            self.seen[name] += 1
            results = [found] if isinstance(found, torch.Tensor) else list(found)
            for index in wanted:
                reference = StorageWeakRef(results[index].untyped_storage())
                self._planned_storages[reference.cdata] = reference
        return found

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[TensorSpec, _HostCopy]:
        """The hook for a tensor that autograd saves: copies planned storages to the host."""
        address = StorageWeakRef(tensor.untyped_storage()).cdata
        if address not in self._planned_storages:
            return tensor.detach()  # the tensor itself may hold the node that saves it: a cycle
        key = address, tensor._version  # after a write in place, the value is another one
        if key not in self._host_copies:
            source = storage_bytes(tensor.detach())
            self._host_copies[key] = _HostCopy(host_memory(source).copy_(source))
        return TensorSpec.of(tensor), self._host_copies[key]


def _unpack(saved: torch.Tensor | tuple[TensorSpec, _HostCopy]) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    spec, host_copy = saved
    return spec.tensor_on(host_copy.storage_on(spec.device))


class ForwardWithHooks(ExportedForward):
    """Runs the module's own forward under saved-tensor hooks that keep results on the host."""

    def __init__(self, module: nn.Module, planned: CallsOnHost) -> None:
        super().__init__(module)
        self.planned = planned

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        marking = _MarkingMode(self.planned)
        with marking, torch.autograd.graph.saved_tensors_hooks(marking.pack, _unpack):
            found = self.own_forward(*args, **kwargs)
        check_counts(type(self._model).__name__, marking.seen, self.planned.n_calls)
        return found
