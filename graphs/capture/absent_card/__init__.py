"""Traces the operators that CUDA runs, on a machine without a card.

Fake CUDA tensors dispatch to CUDA's operators, autocast and autograd formulas, which are part of
every build of PyTorch. While a step is traced, the following supplies what is missing without a
card:

- `device_guard`: autograd asks for CUDA's device guard; a build without CUDA has none and aborts
  the process;
- `engine`: autograd's engine asks for the card's current stream and, in a build with CUDA, the
  driver;
- `operators`: PyTorch picks some operators by asking the card or cuDNN (attention, batch norm,
  recurrent layers, autocast to bfloat16); they are picked by the rules of its source code instead
  (`attention_choice`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from graphs.capture.absent_card.attention_choice import AttentionCall, attention_of
from graphs.capture.absent_card.device_guard import has_device_guard
from graphs.capture.absent_card.engine import can_have_no_accelerator, without_streams
from graphs.capture.absent_card.operators import operators_of
from graphs.capture.tensor_parallel import has_distributed
from graphs.model_calls import TraceError

__all__ = ["AttentionCall", "attention_of", "can_trace_absent", "for_absent_card"]


def can_trace_absent() -> bool:
    """Whether steps can be traced for CUDA in this process although no card is available."""
    return has_device_guard() and can_have_no_accelerator()


@contextlib.contextmanager
def for_absent_card(
    device: torch.device, compute_capability: tuple[int, int] | None, *, model: nn.Module
) -> Iterator[None]:
    """While inside, the model can be traced for a CUDA card that this machine does not have.

    Ambient autocast of the CPU counts as CUDA's, which PyTorch does not enable without a card.
    Does nothing for other devices, or if a card is available.

    device: the device to trace for.
    compute_capability: of the card, (major, minor); None: that of an H100.
    Raises TraceError for a tensor-parallel model: autograd's engine cannot be told that gradients
    which are DTensors are on the CPU (`engine`).
    """
    if device.type != "cuda" or torch.cuda.is_available():
        yield
        return
    if has_distributed(model):
        raise TraceError(
            "a tensor-parallel step cannot be traced for a card that is not in this machine",
            short="the step is tensor-parallel",
        )
    with without_streams(), operators_of(compute_capability or (9, 0)):
        if not torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            yield
            return
        dtype, before = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
