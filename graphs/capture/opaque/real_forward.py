"""Running a model's forward pass for real while it is planned, and undoing what it changes."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.as_eager import no_cache
from graphs.capture.opaque.forms import RandomSources
from graphs.capture.refuse import SideEffectError, attributes_unchanged, objects_unchanged
from graphs.costs import OpCall
from graphs.model_calls import Call


def run_forward(model: nn.Module, call: Call) -> None:
    """Run the model's forward pass on real tensors, without the model's own hooks."""
    args, kwargs = call.arguments(call.tensors)
    model.forward(*args, **kwargs)


@contextlib.contextmanager
def model_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While inside, gradients are off; on exit, what the model has changed is restored.

    That includes attributes that a first call fills. Changes are not refused here: a trace does so.
    """
    gc.collect()  # what an earlier trace has left
    with (
        buffers_restored(model),
        _parameters_restored(model),
        RandomSources.of(model, device).states_restored(),
        no_cache(model),
        contextlib.suppress(SideEffectError),
        attributes_unchanged(model),
        objects_unchanged(model),
        torch.no_grad(),
    ):
        yield


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if buffer.shape != values.shape:  # an observer's first call resizes it
                    buffer.resize_(values.shape)
                buffer.copy_(values)


@contextlib.contextmanager
def _parameters_restored(model: nn.Module) -> Iterator[None]:
    """On exit, parameters have their old values, in their old memory if `.data` was assigned to."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    kept = _KeptValues(data for _, data in before)
    try:
        with kept:
            yield
    finally:
        for parameter, data in before:
            if parameter.data.data_ptr() != data.data_ptr():
                parameter.data = data
        for data, values in kept.overwritten:
            data.copy_(values)


class _KeptValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter when an operator is about to write it: copies of all of them would take
    as much memory as the parameters.

    overwritten: `.data` of the parameters that were written, and their values before.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unwritten: dict[int, list[torch.Tensor]] = defaultdict(list)  # by storage
        for data in parameters:
            if data.layout == torch.strided:
                self._unwritten[data.untyped_storage()._cdata].append(data)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise functions compiled by torch.compile would not run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in OpCall(target=func, args=args, kwargs=kwargs or {}, value=None).mutated():
            if tensor.layout == torch.strided:
                found = self._unwritten.pop(tensor.untyped_storage()._cdata, ())
                self.overwritten += [(data, data.clone()) for data in found]
        return func(*args, **(kwargs or {}))
