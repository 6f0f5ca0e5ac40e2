"""Before a model is built with its weights and run on this machine: what that takes at least.

Only a model that cannot be traced is run. Its user is told first, and where it cannot fit, nothing
is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from solver.cli.model_file import LoadError, ModelFile
from solver.common import format_size


@dataclass(frozen=True)
class RealRun:
    """needs_bytes: at least, activations left out (None: the model has no size before it is built).
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
        needs = "its size is not known before it is built"
        if self.needs_bytes is not None:
            needs = f"{self.kinds} take {format_size(self.needs_bytes)}, activations come on top"
        if math.isinf(self.free_bytes):
            return needs
        return f"{needs}; {format_size(int(self.free_bytes))} of {self.where} are free"


def estimated(file: ModelFile, device: str, *, with_gradients: bool) -> RealRun:
    """Of a step on this device, from model and batch on the meta device. Neither that of an
    optimizer, which does not step, nor activations are counted."""
    import torch

    from graphs.calls import nested
    from graphs.costs import free_bytes

    kinds = "parameters, gradients and batch" if with_gradients else "parameters and batch"
    where = torch.device(device)
    needs_bytes: int | None = None
    try:
        with torch.device("meta"):
            model, batch = file.model(), file.batch()
    except LoadError:
        pass  # needs values to be built
    else:
        tensors = [*model.parameters(), *model.buffers(), *nested.tensors(batch)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        needs_bytes = sum(storages.values())
        if with_gradients:
            needs_bytes += sum(p.nbytes for p in model.parameters() if p.requires_grad)
    title = "this machine's memory" if where.type == "cpu" else f"the memory of {device}"
    return RealRun(needs_bytes, free_bytes(where), kinds, title)
