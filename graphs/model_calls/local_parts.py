"""The part of a distributed tensor (`torch.distributed.tensor.DTensor`) that this rank holds."""

from __future__ import annotations

import sys
from typing import Any

import torch


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
