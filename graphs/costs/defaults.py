"""The cost model of a device where nobody names one, and what is done when a step has been asked
about."""

from __future__ import annotations

import logging

import torch

from graphs.costs.cache import CostCache, default_cache_file
from graphs.costs.models import CostModel, Measured, Roofline
from graphs.files import FormatError
from graphs.hardware import Hardware, named

logger = logging.getLogger(__name__)


def default_costs(device: torch.device) -> CostModel:
    """Measured on a CUDA device, where a roofline knows no workspace; a generic CPU's roofline."""
    return measured(device) if device.type == "cuda" else Roofline(named("cpu"))


def measured(device: torch.device, *, fallback: Hardware | None = None) -> Measured:
    """Measured on this device; on CUDA with what is known from earlier processes.

    fallback: as in `graphs.costs.models.Measured`.
    """
    return Measured(device, fallback=fallback, cache=_cache(device))


def _cache(device: torch.device) -> CostCache | None:
    """What nobody asked to be kept must not be in the way: a file that is none is set aside."""
    if device.type != "cuda":
        return None
    path = default_cache_file(device)
    try:
        return CostCache(path, device)
    except FormatError as error:
        logger.warning("measured costs are not kept: %s", error)
        return None


def save_costs(costs: CostModel) -> None:
    """A step's operators have been asked about: keep what was measured, and give back its memory.

    What the allocator holds of the measured calls has sizes of all kinds; a step that comes after
    would take its own beside it, and the process more than the budget.
    """
    if not isinstance(costs, Measured):
        return
    try:
        costs.save()
    except OSError as error:
        logger.warning("measured costs are not kept: %s", error)
    if costs.device.type == "cuda":
        torch.cuda.empty_cache()
