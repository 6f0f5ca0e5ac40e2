"""Run one forward and backward pass without side effects, to measure its peak memory.

Gradients come from `torch.autograd.grad`: nothing is added to `.grad`, and no gradient accumulation
hooks fire. Parameters, buffers, random state and attributes of modules are restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.capture import attributes_unchanged
from graphs.model_calls import TraceError, device_of, find_loss, nested
from scheduler_runtime.measuring import (
    absolute_peak_bytes,
    buffers_and_random_state_restored,
    free_unreferenced,
    resident_tensors,
)


@dataclass(frozen=True)
class Rehearsal:
    """A forward and backward pass of a model on one call.

    args, kwargs: the arguments of the call.
    loss: computes the loss from the output (None: the loss in the output or, without one, the sum
        of all outputs that require a gradient).
    loss_reads: what the loss reads besides the output, such as a batch with targets.
    optimizers: their state counts as resident.
    outside_bytes: memory that a step will hold and the rehearsal does not: optimizer state that
        does not exist yet.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    loss_reads: Any
    optimizers: Sequence[torch.optim.Optimizer]
    outside_bytes: int

    def run(self, forward: Callable[..., Any]) -> None:
        """Run the forward pass with `forward`, then compute all gradients at once."""
        output = forward(*self.args, **self.kwargs)  # held until the gradients are computed
        loss = self._loss(output)
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        with torch.autocast(device_of(self.model).type, enabled=False):
            torch.autograd.grad(loss, leaves, allow_unused=True)

    def _loss(self, output: Any) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(output)
        try:
            return find_loss(output)
        except TraceError:
            parts = [item.sum() for item in nested.tensors(output) if item.requires_grad]
            if not parts:
                raise
            return torch.stack([part.float() for part in parts]).sum()

    def peak_bytes(self, forward: Callable[..., Any]) -> int:
        """The most bytes on the device during a step, resident ones included.

        The step runs twice: the first run compiles, tunes and fills caches.

        Raises SideEffectError if a forward pass changes plain attributes of a module.
        """
        device = device_of(self.model)
        given = (self.args, self.kwargs, self.loss_reads)
        resident = resident_tensors(self.model, given, self.optimizers)
        with (
            attributes_unchanged(self.model),
            parameters_restored(self.model),
            buffers_and_random_state_restored(self.model),
        ):
            self.run(forward)
            free_unreferenced(device)
            peak_bytes = absolute_peak_bytes(lambda: self.run(forward), device, resident)
        return peak_bytes + self.outside_bytes


@contextlib.contextmanager
def parameters_restored(model: nn.Module) -> Iterator[None]:
    """After this context, parameters are as before, such as those of a momentum encoder, which the
    forward pass changes. Copies of all parameters are kept on the host: which ones it changes is
    known only afterwards."""
    before = [(p, _state_of(p), p.detach().to("cpu", copy=True)) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, state, values in before:
                if _state_of(parameter) != state:
                    parameter.copy_(values)


def _state_of(parameter: nn.Parameter) -> tuple[int, int]:
    """What a write in place, or an assignment to `.data`, changes."""
    return parameter._version, parameter.data_ptr()
