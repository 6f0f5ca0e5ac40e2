"""Sizes on the model's device, and the budget "auto": what a step may take of it now.

The step may take what the driver reports as free and what PyTorch's allocator holds without a
tensor in it, plus the step's own tensors. Tensors of anything else (another model, a teacher,
cached batches) stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn

from graphs.calls import Call
from scheduler_runtime.measuring import bytes_of, resident_tensors
from solver.common import BudgetError, parse_budget, parse_size


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


def free_budget_bytes(
    model: nn.Module,
    call: Call,
    optimizers: Iterable[torch.optim.Optimizer],
    device: torch.device,
    *,
    bucket_bytes: int = 0,
) -> int:
    """The budget "auto". bucket_bytes: of DistributedDataParallel's, which are the step's as well.

    Raises BudgetError where there is no CUDA device to ask.
    """
    if device.type != "cuda":
        refuse_auto_budget(device)
    step_bytes = bucket_bytes + bytes_of(resident_tensors(model, call.tensors, optimizers), device)
    other_bytes = max(0, torch.cuda.memory_allocated(device) - step_bytes)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - other_bytes


def refuse_auto_budget(device: torch.device) -> NoReturn:
    raise BudgetError(
        "budget 'auto' takes what is free on a CUDA device, and the model is on the "
        f"{device.type}; say how many bytes the step may take: fit(model, budget='16GB')"
    )
