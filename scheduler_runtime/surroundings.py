"""What surrounds a planned module: free device memory, DistributedDataParallel, own checkpointing.

DistributedDataParallel copies each gradient into a bucket that is sent as one message. The buckets
exist as long as it does and take as many bytes as the gradients. With
`gradient_as_bucket_view=True` the gradients live in the buckets and exist as long.

With a plan, a model that uses activation checkpointing would recompute twice. Calls of
`torch.utils.checkpoint` are found while the module is traced; the switches of libraries are found
before that, so that the error names the switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from graphs.capture import at_each_checkpoint
from graphs.costs import CostModel, free_bytes
from graphs.model_calls import Call, TraceError, device_of
from scheduler_runtime.measuring import bytes_of, resident_tensors
from solver.device_and_costs import find_hardware, host_beside
from solver.schedule import Places
from solver.sizes_deadlines_progress import BudgetError, Rates, parse_budget, parse_size


def budget_for(
    model: nn.Module, budget: int | float | str, reserve: int | float | str | None
) -> tuple[int, int]:
    """Budget and reserve in bytes, for a step of this model where it is (`parse_budget`)."""
    device = device_of(model)
    return parse_budget(
        budget,
        reserve,
        capacity_bytes=_capacity_bytes(device),
        on_cuda=device.type == "cuda",
        resident_bytes=bytes_of(resident_tensors(model, (), ()), device),
    )


def host_for(
    model: nn.Module,
    host_budget: int | float | str | None,
    host_link: Rates | None,
    costs: CostModel | None,
) -> Places | None:
    """`solver.device_and_costs.host_beside` for a training step of this model where it is.

    costs: of the step's operators, which may know the link (None: they do not).
    """
    device = device_of(model)
    return host_beside(
        host_budget,
        host_link,
        hardware=find_hardware(str(device), needs_rates=False),
        costs=costs,
        resident_bytes=bytes_of(resident_tensors(model, (), ()), device),
    )


def size_on(device: torch.device, size: int | float | str, *, what: str) -> int:
    """`solver.sizes_deadlines_progress.parse_size` for a model that is on this device; may be 0."""
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
    """The budget "auto": what a step may take of the device now.

    That is what the driver reports as free and what PyTorch's allocator holds without a tensor in
    it, plus the step's own tensors. Tensors of anything else (another model, a teacher) stay.
    bucket_bytes: of DistributedDataParallel's, which are the step's as well.

    Raises BudgetError where there is no CUDA device to ask.
    """
    if device.type != "cuda":
        refuse_auto_budget(device)
    step_bytes = bucket_bytes + bytes_of(resident_tensors(model, call.tensors, optimizers), device)
    other_bytes = max(0, torch.cuda.memory_allocated(device) - step_bytes)
    driver_bytes, _ = torch.cuda.mem_get_info(device)
    return driver_bytes + torch.cuda.memory_reserved(device) - other_bytes


def room_bytes(device: torch.device) -> int | None:
    """What can be allocated on a CUDA device now; None for others, where nobody knows."""
    return int(free_bytes(device)) if device.type == "cuda" else None


def n_out_of_memory(device: torch.device) -> int:
    """How often PyTorch's allocator was out of memory so far; 0 where it does not count that."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def refuse_auto_budget(device: torch.device) -> NoReturn:
    raise BudgetError(
        "budget 'auto' takes what is free on a CUDA device, and the model is on the "
        f"{device.type}; say how many bytes the step may take: fit(model, budget='16GB')"
    )


@dataclass(frozen=True)
class Buckets:
    """size_bytes: of all buckets of a replica. are_gradients: the gradients are views of them."""

    size_bytes: int
    are_gradients: bool

    @property
    def separate_bytes(self) -> int:
        """Bytes that they take besides the gradients."""
        return 0 if self.are_gradients else self.size_bytes


def has_gradients(model: nn.Module, buckets: Buckets | None) -> bool:
    """Whether gradients exist before the step."""
    if buckets is not None and buckets.are_gradients:
        return True
    return any(p.grad is not None for p in model.parameters() if p.requires_grad)


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets around this forward pass of the model; None: no DistributedDataParallel runs it.

    PyTorch records which one is running, for its compiler.
    """
    running = DistributedDataParallel._get_active_ddp_module()
    if running is None or all(module is not model for module in running.module.modules()):
        return None
    ignored = set(running.parameters_to_ignore)
    named = running.module.named_parameters()
    sent = (p for name, p in named if p.requires_grad and name not in ignored)
    return Buckets(sum(p.nbytes for p in sent), bool(running.gradient_as_bucket_view))


def why_not_planned(model: nn.Module) -> str | None:
    """Why a module that runs something else than its own `forward` cannot be planned."""
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        return f"{name} sends gradients around the module's step: call fit on the wrapped module"
    if isinstance(model, DataParallel):
        return (
            f"{name} runs copies of its module in threads, and a plan is for one device: use "
            "DistributedDataParallel"
        )
    if any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules()):
        return (
            f"{name} is sharded: FSDP gathers its parameters in hooks of submodules, which a "
            "planned step does not run; solve(..., fsdp=N) plans for one rank, and "
            "checkpoint_solver.export.to_torch_checkpoint applies the plan before sharding"
        )
    if "_orig_mod" in model._modules or model._compiled_call_impl is not None:
        return (
            f"{name} is compiled, and the compiler decides what is saved for backward: call fit on "
            "the module before torch.compile, and leave torch.compile out"
        )
    return None


class CheckpointedAlreadyError(TraceError):
    """The module uses activation checkpointing; says where and how to turn it off."""


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise CheckpointedAlreadyError for switches that are on and for wrapped submodules."""
    for path, module in model.named_modules():
        title = f"submodule {path!r}" if path else f"the model ({type(module).__name__})"
        if getattr(module, "is_activation_checkpointing", False) is True:
            raise CheckpointedAlreadyError(
                f"activation checkpointing is on in {title}, and the plan decides what is "
                "recomputed: leave out activation_checkpointing (or gradient_checkpointing, its "
                "older name), or call model.activation_checkpointing_disable()"
            )
        if isinstance(module, ActivationWrapper):
            raise CheckpointedAlreadyError(
                f"{title} is wrapped in {type(module).__name__}, and the plan decides what is "
                "recomputed: do not wrap it"
            )


def no_checkpoints() -> AbstractContextManager[None]:
    """Refuse calls of `torch.utils.checkpoint.checkpoint` inside."""
    return at_each_checkpoint(_refuse)


def _refuse() -> NoReturn:
    raise CheckpointedAlreadyError(
        "forward calls torch.utils.checkpoint, and the plan decides what is recomputed: call the "
        "function directly (most libraries have a switch for it)"
    )
