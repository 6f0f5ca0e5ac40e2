"""A step whose loss reads other outputs of the module than its program was made for.

That is known when the backward pass begins. What the program has kept is dropped then, and forward
and backward pass run again with a program for the gradients that have arrived: from the same
inputs, random state and buffers, so with the same bits. It runs on copies of the leaves that share
their memory: hooks fire where the gradients leave the first program, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from graphs.calls import Call, nested
from graphs.capture import Capture
from scheduler_runtime.execute.random_state import get_state, set_state

Place = tuple[str, ...] | int
"""Of a tensor that a program starts from: its path in the module, or its index in the call."""


class OnTensors(Protocol):
    """A program that can run on other tensors than those of the module and the call."""

    def run_on(self, tensors: Mapping[Place, torch.Tensor]) -> Any: ...


Other = Callable[[Call, tuple[int, ...], int], OnTensors]
"""The program of a call for gradients of these flat outputs, while so many bytes are held."""


def can_run_again(captured: Capture) -> bool:
    """Whether the gradients that arrive may be others than planned: of several made outputs."""
    made = {captured.outputs[index] for index in captured.differentiable} - {*captured.sources}
    return len(made) > 1


def kept_bytes(captured: Capture, device: torch.device) -> int:
    """What `Again` keeps from the forward pass to the end of the step, besides what is there."""
    if not can_run_again(captured):
        return 0
    copies = sum(node.meta["val"].nbytes for node in captured.mutations)
    # of a CUDA device, too, the generator's state is in the memory of the host
    return int(copies) + (get_state(device).nbytes if device.type == "cpu" else 0)


def step_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where the step of these tensors computes; scalars of a step on a card may be on the CPU."""
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


class Again:
    """What a forward pass started from, so that it can run again.

    tensors: placeholder of the traced graph -> parameter, buffer or batch tensor.
    places: of each of them.
    leaves: those that a gradient may be for.
    written: the placeholders of those that forward changes.
    positions: of the flat outputs that the program computes.
    """

    def __init__(
        self,
        other: Other,
        call: Call,
        tensors: Mapping[fx.Node, torch.Tensor],
        *,
        places: Mapping[fx.Node, Place],
        written: Sequence[fx.Node],
        positions: Sequence[int],
    ) -> None:
        self._other, self._call = other, call
        self._positions = positions
        self._tensors, self._places = tensors, places
        self.leaves = tuple(node for node, each in tensors.items() if each.requires_grad)
        self._versions = [(t, t._version) for node, t in tensors.items() if node not in written]
        self._before = [(tensors[node], tensors[node].detach().clone()) for node in written]
        self._device = step_device(tensors.values())
        self._random_state = get_state(self._device)
        kind = self._device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )

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
                # Copies, each a leaf: `autograd.grad` fires the hooks of the tensors that it is
                # asked for, and those of a non-leaf would be in both graphs.
                copies = {node: self._tensors[node].detach() for node in self._tensors}
                leaves = [copies[node].requires_grad_() for node in self.leaves]
                flat = nested.leaves(self._run(copies, tuple(reached), held_bytes))
                found = torch.autograd.grad(
                    [flat[position] for position in reached],
                    leaves,
                    list(reached.values()),
                    allow_unused=True,
                )
        finally:
            _copy(now)
        return dict(zip(self.leaves, found, strict=True))

    def _run(
        self, tensors: Mapping[fx.Node, torch.Tensor], reached: tuple[int, ...], held_bytes: int
    ) -> Any:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._autocast:
            program = self._other(self._call, reached, held_bytes)
            set_state(self._random_state, self._device)
            return program.run_on({self._places[node]: each for node, each in tensors.items()})


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, values in pairs:
            tensor.copy_(values)
