"""What surrounds a planned module: free device memory, DistributedDataParallel, own checkpointing.

DistributedDataParallel copies gradients into buckets, each of which is sent as one message. The
buckets exist as long as the wrapper, and take as many bytes as the gradients. With
`gradient_as_bucket_view=True`, the gradients are views of the buckets, and exist as long, unless
they are made in `no_sync()` after they were set to None: those are tensors of their own, which are
copied into the buckets by the next backward pass outside of it.

A model that uses activation checkpointing would recompute twice under a plan, so it is refused.
Calls of `torch.utils.checkpoint` are found while the module is traced. The switches of libraries
are looked for before, so that the error can name the switch.
"""

from __future__ import annotations

import functools
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
from solver.device_and_costs import find_hardware, host_places
from solver.schedule import Places
from solver.sizes_deadlines_progress import BudgetError, Rates, parse_budget, parse_size


def budget_for(
    model: nn.Module, budget: int | float | str, reserve: int | float | str | None
) -> tuple[int, int]:
    """Budget and reserve in bytes, for a step of this model on its present device
    (`parse_budget`)."""
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
    """The host memory that a plan may copy to, for this model on its present device.

    See `solver.device_and_costs.host_places`. costs: the cost model of the step's operators, which
    may know the speed of the link (None: there is none).
    """
    device = device_of(model)
    return host_places(
        host_budget,
        host_link,
        hardware=find_hardware(str(device), needs_rates=False),
        costs=costs,
        resident_bytes=bytes_of(resident_tensors(model, (), ()), device),
    )


def size_on(device: torch.device, size: int | float | str, *, what: str) -> int:
    """Parse a size (`parse_size`), of which shares are those of this device's memory; may be 0."""
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
    """The budget "auto": what a step may use of the device now.

    That is the memory that the driver reports as free, plus what PyTorch's allocator has reserved
    but does not use, plus the step's own tensors. Other tensors (of a teacher model, say) are left
    out.

    bucket_bytes: buckets of DistributedDataParallel, which belong to the step as well.

    Raises BudgetError if the device is not a CUDA device.
    """
    if device.type != "cuda":
        refuse_auto_budget(device)
    step_bytes = bucket_bytes + bytes_of(resident_tensors(model, call.tensors, optimizers), device)
    other_bytes = max(0, torch.cuda.memory_allocated(device) - step_bytes)
    driver_bytes, _ = torch.cuda.mem_get_info(device)
    return driver_bytes + torch.cuda.memory_reserved(device) - other_bytes


def room_bytes(device: torch.device) -> int | None:
    """How much can be allocated on a CUDA device now; None for others, where it is not known."""
    return int(free_bytes(device)) if device.type == "cuda" else None


def n_out_of_memory(device: torch.device) -> int:
    """How often PyTorch's CUDA allocator has run out of memory so far; 0 for other devices."""
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
    """The gradient buckets of DistributedDataParallel.

    size_bytes: of all buckets of a replica.
    are_gradients: whether the gradients of the step are views of them.
    are_for_views: whether they may be (`gradient_as_bucket_view=True`).
    """

    size_bytes: int
    are_gradients: bool
    are_for_views: bool

    @property
    def separate_bytes(self) -> int:
        """Bytes that the buckets take besides the gradients."""
        return 0 if self.are_gradients else self.size_bytes


def has_gradients(model: nn.Module, buckets: Buckets | None) -> bool:
    """Whether gradients of the model exist before the step."""
    if buckets is not None and buckets.are_gradients:
        return True
    return any(p.grad is not None for p in model.parameters() if p.requires_grad)


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets of the DistributedDataParallel that runs this forward pass; None: none does.

    PyTorch records which wrapper is running, for its compiler.
    """
    running = DistributedDataParallel._get_active_ddp_module()
    if running is None or all(module is not model for module in running.module.modules()):
        return None
    ignored = set(running.parameters_to_ignore)
    named = running.module.named_parameters()
    sent = [p for name, p in named if p.requires_grad and name not in ignored]
    are_for_views = bool(running.gradient_as_bucket_view)
    existing = [p.grad for p in sent if p.grad is not None] if are_for_views else []
    # without gradients, this backward pass makes views if it sends them
    are_views = (
        all(g._is_view() for g in existing)
        if existing
        else bool(running.require_backward_grad_sync)
    )
    return Buckets(sum(p.nbytes for p in sent), are_for_views and are_views, are_for_views)


def why_not_planned(model: nn.Module) -> str | None:
    """Why this module cannot be planned as it is: it does not run its own `forward`, or needs hooks
    of submodules. None: it can."""
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
    if path := _also_sets_forward_of(model):
        return (
            f"{name} passes attributes that are set on it on to the module that it wraps "
            f"({path!r}), whose forward would be replaced, too: call fit on the wrapped module"
        )
    return None


def _also_sets_forward_of(model: nn.Module) -> str:
    """The path of a submodule that gets a `forward` that is assigned to the module (Lightning
    Fabric's wrapper); "" if there is none."""
    if type(model).__setattr__ is nn.Module.__setattr__:
        return ""
    before = [(module, module.__dict__.get("forward")) for module in model.modules()]
    probe = functools.partial(type(model).forward, model)
    try:
        model.forward = probe
        return next(
            (
                path
                for path, module in model.named_modules()
                if module is not model and module.__dict__.get("forward") is probe
            ),
            "",
        )
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


class CheckpointedAlreadyError(TraceError):
    """The module uses activation checkpointing; the message says where and how to turn it off."""


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise CheckpointedAlreadyError if a library's switch is on or a submodule is wrapped."""
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
    """In this context, calls of `torch.utils.checkpoint` raise CheckpointedAlreadyError."""
    return at_each_checkpoint(_refuse)


def _refuse() -> NoReturn:
    raise CheckpointedAlreadyError(
        "forward calls torch.utils.checkpoint, and the plan decides what is recomputed: call the "
        "function directly (most libraries have a switch for it)"
    )
