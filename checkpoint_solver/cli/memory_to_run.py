"""The least memory needed to build a model with its weights and run it on this machine.

It is estimated before a model that cannot be traced is run: the user is told, and if it cannot fit,
nothing is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver.sizes_deadlines_progress import format_size

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model and its batch.

    needs_bytes: bytes of parameters, buffers and batch.
    gradients_bytes: bytes of the gradients, which is those of the trained parameters.
    """

    needs_bytes: int
    gradients_bytes: int

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> ModelSizes | None:
        """Add up the sizes of a model and batch that were built for tracing, mostly on meta.

        None if a tensor has no size (in a lazy module) or no storage (a sparse tensor).
        """
        from graphs.model_calls import nested  # here: it takes torch

        tensors = [*model.parameters(), *model.buffers(), *nested.tensors(batch)]
        try:
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            gradients_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        except (RuntimeError, ValueError):
            return None
        return cls(sum(storages.values()), gradients_bytes)


@dataclass(frozen=True)
class MemoryToRun:
    """The memory that a real step needs on this machine, as text for messages too (`str`).

    needs_bytes: a lower bound, without activations (None: unknown before it runs).
    free_bytes: free memory of the device (inf: unknown).
    kinds: what is counted, in words.
    where: the memory it runs in, in words.
    """

    needs_bytes: int | None
    free_bytes: float
    kinds: str
    where: str

    @property
    def fits(self) -> bool:
        return self.needs_bytes is None or self.needs_bytes <= self.free_bytes

    def __str__(self) -> str:
        needs = "its size is not known before it runs"
        if self.needs_bytes is not None:
            needs = f"{self.kinds} take {format_size(self.needs_bytes)}, activations come on top"
        if math.isinf(self.free_bytes):
            return needs
        return f"{needs}; {format_size(int(self.free_bytes))} of {self.where} are free"


def estimate_memory(sizes: ModelSizes | None, device: str, *, with_gradients: bool) -> MemoryToRun:
    """Estimate the memory of a real step on this device.

    Neither activations nor the optimizer's state are counted; the optimizer does not step.

    sizes: the sizes of model and batch (None: unknown).
    with_gradients: count gradients too.
    """
    import torch

    from graphs.costs import free_bytes

    kinds = "parameters, gradients and batch" if with_gradients else "parameters and batch"
    where = torch.device(device)
    needs_bytes: int | None = None
    if sizes is not None:
        needs_bytes = sizes.needs_bytes + with_gradients * sizes.gradients_bytes
    title = "this machine's memory" if where.type == "cpu" else f"the memory of {device}"
    return MemoryToRun(needs_bytes, free_bytes(where), kinds, title)
