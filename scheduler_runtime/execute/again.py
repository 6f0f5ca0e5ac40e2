"""A step whose loss reads other outputs of the module than its program was made for.

That is known when the backward pass begins. What the program has kept is dropped then, and forward
and backward pass run again with a program for the gradients that have arrived: from the same
inputs, random state and buffers, so with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphs.calls import Call, nested
from scheduler_runtime.execute.random_state import get_state, set_state
from scheduler_runtime.execute.step_program import StepProgram

Other = Callable[[Call, tuple[int, ...], int], StepProgram]
"""The program of a call for gradients of these flat outputs, while so many bytes are held."""


class Again:
    """What a forward pass started from, so that it can run again.

    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    written: the placeholders of those that forward changes.
    positions: of the flat outputs that the program computes.
    """

    def __init__(
        self,
        other: Other,
        model: nn.Module,
        call: Call,
        tensors: Mapping[fx.Node, torch.Tensor],
        *,
        written: Sequence[fx.Node],
        positions: Sequence[int],
    ) -> None:
        self._other, self._model, self._call = other, model, call
        self._positions = positions
        self._leaves = {node: each for node, each in tensors.items() if each.requires_grad}
        self._versions = [(t, t._version) for node, t in tensors.items() if node not in written]
        self._before = [(tensors[node], tensors[node].detach().clone()) for node in written]
        self._device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self._random_state = get_state(self._device)
        kind = self._device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )

    @property
    def leaves(self) -> tuple[fx.Node, ...]:
        """Those that a gradient may be for."""
        return tuple(self._leaves)

    def gradients(
        self, arrived: Sequence[torch.Tensor | None]
    ) -> dict[fx.Node, torch.Tensor | None]:
        """The gradients of the leaves, for those of the outputs that the program computes."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "another output of the model gets a gradient than planned, and the step cannot run "
                "again, because a parameter or the batch has changed since its forward pass: call "
                "backward first, or say which outputs the loss is computed from: "
                "fit(model, loss_outputs=lambda output: ...)"
            )
        pairs = zip(self._positions, arrived, strict=True)
        reached = {position: gradient for position, gradient in pairs if gradient is not None}
        now = [(tensor, tensor.detach().clone()) for tensor, _ in self._before]
        _copy(self._before)
        try:
            with torch.enable_grad():
                held = [*reached.values(), self._random_state]
                held += [values for _, values in (*self._before, *now)]
                held_bytes = sum(each.untyped_storage().nbytes() for each in held)
                flat = nested.leaves(self._run(tuple(reached), held_bytes))
                found = torch.autograd.grad(
                    [flat[position] for position in reached],
                    list(self._leaves.values()),
                    list(reached.values()),
                    allow_unused=True,
                )
        finally:
            _copy(now)
        return dict(zip(self._leaves, found, strict=True))

    def _run(self, reached: tuple[int, ...], held_bytes: int) -> Any:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._autocast:
            program = self._other(self._call, reached, held_bytes)
            set_state(self._random_state, self._device)
            return program.run(self._model, self._call)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, values in pairs:
            tensor.copy_(values)
