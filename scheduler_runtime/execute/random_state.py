"""Give a random operator the same random numbers when it is recomputed.

The state of the device's generator is saved before the operator's first run, and restored during a
recomputation; the global stream of random numbers is not affected. This also works for fused
attention, which takes no seed as an argument but draws one from the generator. In a step that is
recorded as CUDA graphs, `random_in_graphs` replaces the saved state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch


class RandomRun(Protocol):
    """What a recording keeps of a random operator's first run, instead of a generator state."""

    def rerun(self, run: Callable[[], Any]) -> Any:
        """Run the operator once more with the numbers of its first run."""


keep_instead: ContextVar[Callable[[], RandomRun | None] | None] = ContextVar(
    "keep_instead", default=None
)
"""Called at each first run while a step is recorded. If it returns None, the state is kept."""


def run_and_keep_state(
    operator: Callable[..., Any], device: torch.device, /, *args: Any, **kwargs: Any
) -> tuple[Any, torch.Tensor | RandomRun]:
    """Run the operator; return its result and the generator's state from before."""
    instead = keep_instead.get()
    recorded = None if instead is None else instead()
    state = get_state(device) if recorded is None else recorded
    return operator(*args, **kwargs), state


def recompute_random(
    operator: Callable[..., Any],
    device: torch.device,
    state: torch.Tensor | RandomRun,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the operator with the state of its first run; the generator's own state is unchanged."""
    if not isinstance(state, torch.Tensor):
        return state.rerun(lambda: operator(*args, **kwargs))
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
