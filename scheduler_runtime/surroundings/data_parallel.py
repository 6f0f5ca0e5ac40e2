"""What DistributedDataParallel keeps on the device beside a replica's own step.

Its reducer copies each gradient into a bucket that is sent as one message. The buckets are there
from its construction to its end: as many bytes again as the gradients. With
`gradient_as_bucket_view=True` the buckets are the gradients; then these are what stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel


@dataclass(frozen=True)
class Buckets:
    """size_bytes: of all buckets of a replica. are_gradients: the gradients are views of them."""

    size_bytes: int
    are_gradients: bool


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets around this forward pass of the model; None: no DistributedDataParallel runs it.

    PyTorch notes which of them is running, for its compiler.
    """
    running = DistributedDataParallel._get_active_ddp_module()
    if running is None or all(module is not model for module in running.module.modules()):
        return None
    ignored = set(running.parameters_to_ignore)
    sizes = [
        parameter.numel() * parameter.element_size()
        for name, parameter in running.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    return Buckets(sum(sizes), bool(running.gradient_as_bucket_view))


def why_not_planned(model: nn.Module) -> str | None:
    """Why a module that spreads its work over devices cannot be planned; None: it does not."""
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        return f"{name} sends gradients around the module's step: call fit on the module in it"
    if isinstance(model, DataParallel):
        return (
            f"{name} runs copies of its module in threads, and a plan is for one device: use "
            "DistributedDataParallel"
        )
    if any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules()):
        return (
            f"{name} is sharded: its parameters are gathered in hooks of submodules, which a "
            "planned step would not run; solve(..., fsdp=N) plans for a rank, and "
            "scheduler_runtime.export.to_torch_checkpoint puts the plan in before it is sharded"
        )
    return None
