"""The budget "auto": what a step may take of a CUDA device, from what is free on it now.

The driver's free bytes and those that PyTorch's allocator holds without a tensor in them are both
there to be used. So the step may take all that is free, all that the allocator holds, less the
tensors that belong to something else (another model, a teacher, cached batches): those stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from graphs.calls import Call
from scheduler_runtime.measuring import bytes_of, resident_tensors
from solver.common import BudgetError, parse_budget, parse_size


@dataclass(frozen=True)
class DeviceMemory:
    """One device at one moment. free_bytes: the driver's. reserved_bytes: held by the allocator.
    allocated_bytes: of those in tensors. step_bytes: of those in tensors of the step itself."""

    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    step_bytes: int

    @property
    def budget_bytes(self) -> int:
        """What the whole step may take: its own tensors and all that nobody else has."""
        others_bytes = max(0, self.allocated_bytes - self.step_bytes)
        return self.free_bytes + self.reserved_bytes - others_bytes


def budget_on(
    device: torch.device, budget: int | str, reserve: int | str | None
) -> tuple[int, int]:
    """`solver.common.parse_budget` for a model that is on this device."""
    return parse_budget(
        budget, reserve, capacity_bytes=_capacity_bytes(device), on_cuda=device.type == "cuda"
    )


def size_on(device: torch.device, size: int | str, *, what: str) -> int:
    """`solver.common.parse_size` for a model that is on this device; may be 0."""
    return parse_size(size, capacity_bytes=_capacity_bytes(device), what=what, least_bytes=0)


def _capacity_bytes(device: torch.device) -> int | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


def memory_now(device: torch.device, step_bytes: int) -> DeviceMemory:
    """Ask the driver and the allocator. Raises BudgetError where there is no CUDA device to ask."""
    if device.type != "cuda":
        raise BudgetError(no_auto(device.type))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        free_bytes=free_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        step_bytes=step_bytes,
    )


def no_auto(kind: str) -> str:
    """Why "auto" is refused on a device of this kind, and what to give instead."""
    return (
        f"budget 'auto' takes what is free on a CUDA device, and the model is on the {kind}; give "
        "the bytes that the step may take, such as fit(model, budget='16GB')"
    )


def step_bytes_now(
    model: nn.Module, call: Call, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> int:
    """Bytes on the device of what a step keeps there and that is there already.

    Parameters, buffers, gradients, the batch and the optimizers' state, each storage once.
    """
    return bytes_of(resident_tensors(model, call.tensors, optimizers), device)
