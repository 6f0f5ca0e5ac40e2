"""Settings of torch by which operators choose kernels when they run, and so how they round.

A recomputation in the backward pass finds the settings of the backward pass. If these are not those
of the forward pass, its results may have other bits than those that the loss was computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PRECISIONS = {
    f"torch.backends.{backend}.{operator}.fp32_precision": (backend, operator)
    for backend in ("cuda", "mkldnn")
    for operator in ("matmul", "conv", "rnn")
}
_SETTINGS: dict[str, Callable[[], Any]] = {
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "torch.backends.mkldnn.deterministic": torch._C._get_mkldnn_deterministic,
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.use_deterministic_algorithms": torch._C._get_deterministic_algorithms,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.preferred_linalg_library": torch._C._get_linalg_preferred_backend,
    **{
        title: lambda of=of: torch._C._get_fp32_precision_getter(*of)  # type: ignore[misc]
        for title, of in _PRECISIONS.items()
    },
}


class KernelSettings:
    """The settings at the time when this object is made."""

    def __init__(self) -> None:
        self._values = [read() for read in _SETTINGS.values()]

    def refuse_others(self) -> None:
        """Raise RuntimeError if a setting has changed since."""
        for (title, read), before in zip(_SETTINGS.items(), self._values, strict=True):
            if (now := read()) != before:
                raise RuntimeError(
                    f"{title} was {before} in the forward pass and is {now} in the backward pass, "
                    "in which the plan recomputes operators: these could round otherwise. Call "
                    "loss.backward() with the setting of the forward pass (in the same `with` "
                    "block), or plan with a budget that needs no recomputation"
                )
