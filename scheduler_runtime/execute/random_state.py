"""The same random numbers when an operator is recomputed.

Before the first run of a random operator the state of its device's generator is saved; for a
recomputation that state is restored during the call, and the global stream continues unaffected. So
fused attention, which takes no seed as an argument, is recomputed too: it draws its seed from the
generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_and_keep_state(
    operator: Callable[..., Any], device: torch.device, /, *args: Any, **kwargs: Any
) -> tuple[Any, torch.Tensor]:
    """Run the operator; return its result and the generator's earlier state."""
    state = get_state(device)
    return operator(*args, **kwargs), state


def recompute_random(
    operator: Callable[..., Any],
    device: torch.device,
    state: torch.Tensor,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the operator with the state of its first run; the global stream is untouched."""
    current = get_state(device)
    set_state(state, device)
    try:
        return operator(*args, **kwargs)
    finally:
        set_state(current, device)


def get_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
