"""What surrounds a replica: DistributedDataParallel's buckets, and wrappers that rule out a plan.

DistributedDataParallel copies each gradient into a bucket that is sent as one message. The buckets
exist as long as it does and take as many bytes as the gradients. With
`gradient_as_bucket_view=True` the gradients live in the buckets and exist as long.
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

    @property
    def separate_bytes(self) -> int:
        """Bytes that they take besides the gradients."""
        return 0 if self.are_gradients else self.size_bytes


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets around this forward pass of the model; None: no DistributedDataParallel runs it.

    PyTorch records which one is running, for its compiler.
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
            "scheduler_runtime.export.to_torch_checkpoint applies the plan before sharding"
        )
    if "_orig_mod" in model._modules or model._compiled_call_impl is not None:
        return (
            f"{name} is compiled, and the compiler decides what is saved for backward: call fit on "
            "the module before torch.compile, and leave torch.compile out"
        )
    return None
