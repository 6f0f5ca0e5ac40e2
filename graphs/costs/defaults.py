"""The default cost model of a device."""

from __future__ import annotations

import logging

import torch

from graphs.costs.cache import CostCache, default_cache_file
from graphs.costs.models import CostModel, Measured, Roofline
from graphs.files import FormatError
from graphs.hardware import Hardware, named

logger = logging.getLogger(__name__)


def default_costs(device: torch.device) -> CostModel:
    """Measured costs on a CUDA device, where a roofline does not know the workspace of cuDNN's
    convolutions; on the CPU, the roofline of a generic CPU."""
    return measured(device) if device.type == "cuda" else Roofline(named("cpu"))


def measured(device: torch.device, *, fallback: Hardware | None = None) -> Measured:
    """A model that measures on this device; on CUDA it starts from the costs that earlier processes
    saved.

    fallback: as in `graphs.costs.models.Measured`.
    """
    cache = None
    if device.type == "cuda":
        try:
            cache = CostCache(default_cache_file(device), device)
        except FormatError as error:  # the cache is implicit: a corrupt file must not fail
            logger.warning("measured costs will not be saved: %s", error)
    return Measured(device, fallback=fallback, cache=cache)


def finish_measuring(costs: CostModel) -> None:
    """Save measured costs to the file, and empty PyTorch's CUDA allocator cache.

    The allocator has cached blocks of all sizes that were measured. A step that runs afterwards
    would allocate its own besides, and the process would exceed the budget.
    """
    if not isinstance(costs, Measured):
        return
    try:
        costs.save()
    except OSError as error:
        logger.warning("measured costs were not saved: %s", error)
    if costs.device.type == "cuda":
        torch.cuda.empty_cache()
