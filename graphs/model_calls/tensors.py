"""Tensors apart from their values: form, storage, autograd graph, a rank's part of a DTensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def strided_like(
    tensor: torch.Tensor,
    device: torch.device | str | None = None,
    *,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """An empty tensor of the same shape, strides and dtype. (`empty_like` would close gaps.)

    device, strides: instead of the tensor's own.
    """
    return torch.empty_strided(
        tensor.shape,
        tensor.stride() if strides is None else strides,
        dtype=tensor.dtype,
        device=tensor.device if device is None else device,
    )


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both strides place every element alike. Those of dimensions of size 1 do not
    matter."""
    each = zip(shape, one, other, strict=True)
    return all(size == 1 or a == b for size, a, b in each)


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory, while one of them exists."""
    return int(tensor.untyped_storage()._cdata)


def dense_storage_key(tensor: torch.Tensor) -> int | None:
    """The same; None for a tensor that is not dense, and so has no storage of its elements."""
    return storage_key(tensor) if tensor.layout == torch.strided else None


def fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous and its storage has no other bytes, so that a copy of its
    bytes is a copy of the storage."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def named_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that an operator is given, by their names in its schema."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def autograd_functions(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd functions that a backward pass from these tensors would run, each once.

    The function that accumulates a leaf's gradient has the leaf as its `variable`.
    """
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while stack:
        function = stack.pop()
        if function not in seen:
            seen.add(function)
            yield function
            stack += [before for before, _ in function.next_functions]


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype of the gradients that autograd gives a leaf, by its `grad_dtype`; None: any.

    Before torch 2.15, only leaves have that attribute.
    """
    return tensor.grad_dtype if tensor.is_leaf else tensor.dtype


def gradient_bytes(parameter: torch.Tensor) -> int:
    """Bytes of the gradient of a parameter."""
    return parameter.numel() * (gradient_dtype(parameter) or parameter.dtype).itemsize


def is_distributed(tensor: object) -> bool:
    """Whether the object is a DTensor."""
    return is_distributed_class(type(tensor))


def is_distributed_class(kind: type) -> bool:
    """Whether this is DTensor or a subclass. Does not import torch's module, which takes a second:
    if that is not imported, nothing is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor is returned itself."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = distributed.to_local()
    return local


def distributed_as(spec: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with this local part, and the mesh, placements, shape and strides of a spec."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        made: torch.Tensor = DTensor.from_local(
            local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
        )
    return made
