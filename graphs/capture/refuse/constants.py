"""Tensors that a module reads and that are not parameters, buffers or part of the batch.

A trace treats them as constants. A tensor that requires a gradient is refused, since it would get
none. If the tensor is in a plain attribute (`self.scale = torch.tensor(2.0)`), the attribute is
recorded, so that a later replacement is noticed. Tensors in closures and globals are compared by
`scheduler_runtime.planned.read_elsewhere`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphs.capture.refuse.side_effects import SideEffectError
from graphs.costs import tensors_in
from graphs.model_calls import TraceError, nested, storage_key


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor in a plain attribute of a module.

    module: path of the module.
    attribute: name of the attribute, which may hold a list, tuple, dict or object with attributes.
    index: position of the tensor among all tensors that the attribute holds.
    """

    module: str
    attribute: str
    index: int
    tensor: torch.Tensor

    def holds(self, model: nn.Module) -> bool:
        """Whether the attribute still holds this very tensor."""
        module = model.get_submodule(self.module)
        value = vars(module).get(self.attribute, module._buffers.get(self.attribute))
        tensors = list(_tensors_in(value))
        return self.index < len(tensors) and tensors[self.index] is self.tensor


_OTHER_WAY = (
    "the step reads parameter {!r} by another way than as an attribute of its module in forward, "
    "and a plan would give it no gradient there: through a dict, an object or a closure (the "
    "TensorDictParams of torchrl's losses), or in the backward pass of an autograd.Function that "
    "calls the module again (odeint_adjoint of torchdiffeq). Read it as an attribute, fit a module "
    "inside of this one that does, or train without a plan"
)


class ReadTensors:
    """The real tensors that were read in one trace.

    parameters: id of each of the model's parameters -> its name.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._by_storage: dict[int, torch.Tensor] = {}

    def note(self, operator: object, args: Iterable[object]) -> None:
        """Record the real tensors among an operator's arguments.

        Raises TraceError if one of them requires a gradient, unless the operator is `detach` or
        gradients are off.
        """
        for item in tensors_in(tuple(args)):
            if isinstance(item, FakeTensor):
                continue
            is_detached = operator is torch.ops.aten.detach.default
            if item.requires_grad and torch.is_grad_enabled() and not is_detached:
                if (name := self._parameters.get(id(item))) is not None:
                    raise TraceError(_OTHER_WAY.format(name))
                raise TraceError(
                    f"forward reads a tensor of shape {tuple(item.shape)} that requires a gradient "
                    "and is not a parameter of the module, so no gradient would reach it: "
                    "register it (nn.Parameter as an attribute, nn.ParameterList for a list), "
                    "pass it in with the batch, or detach it. If an earlier call has left it (the "
                    "state of a spiking neuron), reset it before each step, and put a loop over "
                    "time steps into forward"
                )
            self._by_storage[storage_key(item)] = item

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The recorded tensors, one per storage."""
        return tuple(self._by_storage.values())

    def held_by(self, model: nn.Module) -> tuple[HeldTensor, ...]:
        """The recorded tensors that are in plain attributes of the model's modules."""
        return tuple(
            HeldTensor(path, attribute, index, tensor)
            for path, module in model.named_modules()
            for attribute, value in vars(module).items()
            if attribute not in ("_parameters", "_buffers", "_modules")
            for index, tensor in enumerate(_tensors_in(value))
            if storage_key(tensor) in self._by_storage
        )

    def refuse_hidden(self, arguments: Iterable[object]) -> None:
        """Raise TraceError if an argument is an object whose attributes hold a recorded tensor."""
        for argument in arguments:
            attributes = getattr(argument, "__dict__", {})
            for tensor in nested.tensors(list(attributes.values())):
                if storage_key(tensor) in self._by_storage:
                    raise TraceError(
                        f"an argument of type {type(argument).__name__} hides tensors; every step "
                        "would read those of the first call: pass the tensors directly, in a dict "
                        "or in a dataclass"
                    )


def refuse_writing_real_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Raise SideEffectError if a tensor that an operator writes is real: tracing would change it.

    This also happens if the backward pass calls a module of the model again, on the model's own
    tensors.
    """
    if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
        raise SideEffectError(
            "the step changes in place a tensor that it has not made (in a plain attribute, or a "
            "buffer in the backward pass of an autograd.Function); make it a buffer, and change "
            "it in forward"
        )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor | list | tuple | dict) or is_dataclass(value):
        yield from nested.tensors(value)
    elif not isinstance(value, nn.Module | type):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from nested.tensors(list(attributes.values()))
