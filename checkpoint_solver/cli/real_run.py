"""Before a model is built with its weights and run on this machine: what that takes at least.

Only a model that cannot be traced is run. Its user is told first, and where it cannot fit, nothing
is built.
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
    """needs_bytes: of parameters, buffers and batch. gradients_bytes: of what is trained."""

    needs_bytes: int
    gradients_bytes: int

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> ModelSizes | None:
        """Of what was built to be traced, on the meta device where that is possible.

        None: a tensor has no size (a lazy module) or no storage (a sparse one).
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
class RealRun:
    """needs_bytes: at least, activations left out (None: unknown before it runs).
    free_bytes: of the device (inf: unknown). kinds: what is counted. where: it runs.
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


def estimated(sizes: ModelSizes | None, device: str, *, with_gradients: bool) -> RealRun:
    """Of a step on this device. Neither the state of an optimizer, which does not step, nor
    activations are counted. sizes: None: unknown."""
    import torch

    from graphs.costs import free_bytes

    kinds = "parameters, gradients and batch" if with_gradients else "parameters and batch"
    where = torch.device(device)
    needs_bytes: int | None = None
    if sizes is not None:
        needs_bytes = sizes.needs_bytes + with_gradients * sizes.gradients_bytes
    title = "this machine's memory" if where.type == "cpu" else f"the memory of {device}"
    return RealRun(needs_bytes, free_bytes(where), kinds, title)
