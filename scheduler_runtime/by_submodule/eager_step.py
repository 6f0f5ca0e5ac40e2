"""A training step as people write it: forward, loss, backward, in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphs.calls import as_call, device_of, find_loss, nested
from scheduler_runtime.by_submodule.observe import as_before
from scheduler_runtime.measuring import peak_above_bytes


class NoLossError(ValueError):
    """What was returned is no loss."""


class ObservedStep:
    """The training step as people write it."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        inputs: Callable[[Any], Any] | None,
    ) -> None:
        self.model, self._batch, self._loss = model, batch, loss
        self.args, self.kwargs = as_call(batch, inputs)
        self.batch_tensors = nested.tensors(batch)
        self._held: Any = None

    def forward(self) -> torch.Tensor:
        self._held = self.model(*self.args, **self.kwargs)  # the caller holds it
        loss = self._loss
        value = find_loss(self._held) if loss is None else loss(self._held, self._batch)
        if not isinstance(value, torch.Tensor):
            raise NoLossError("the model returns no loss; give loss=lambda output, batch: ...")
        return value

    def resident_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, tensors in (
            ("parameter", self.model.parameters()),
            ("buffer", self.model.buffers()),
            ("input", iter(self.batch_tensors)),
        ):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes

    def changed_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that a step changes."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with as_before(self.model):
            self.forward()
            self._held = None
            return tuple(
                name
                for name, buffer in self.model.named_buffers()
                if not torch.equal(buffer, before[name])
            )

    def measured_bytes(self, put: Callable[[], object], take_out: Callable[[], object]) -> int:
        """The peak of one step with a plan in place, resident bytes included."""
        self._held = None
        put()
        try:
            with as_before(self.model):
                self.forward().backward()  # makes what is made once
            self._held = None
            with as_before(self.model):
                device = device_of(self.model)
                used = peak_above_bytes(lambda: self.forward().backward(), device)
        finally:
            self._held = None
            take_out()
        return sum(self.resident_bytes().values()) + used
