"""The modules, parameters and buffers of a model: under which names, and which of them are one.

A program reads each tensor at one path, also a tensor or module that the model has under several.
So it depends on what is shared: if tied weights are separated, or layers change places, another
path may hold the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModuleTree:
    """modules, parameters, buffers: each once, in the order of `model.modules()` and so on.

    submodules: for each place of a submodule: its parent and itself as positions in `modules`, and
        its name.
    parameter_places, buffer_places: for each place of a tensor: its module as a position in
        `modules`, its name, and its own position (None: the place is empty).
    """

    modules: list[nn.Module]
    submodules: tuple[tuple[int, str, int], ...]
    parameters: list[torch.Tensor]
    parameter_places: tuple[tuple[int, str, int | None], ...]
    buffers: list[torch.Tensor]
    buffer_places: tuple[tuple[int, str, int | None], ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        modules = [model]
        positions = {id(model): 0}
        submodules: list[tuple[int, str, int]] = []
        # The submodules of each module are visited before its next sibling, without recursion: a
        # model may be nested deeply.
        waiting = [(0, iter(list(model._modules.items())))]
        while waiting:
            parent, places = waiting[-1]
            for name, module in places:
                if module is None:
                    continue
                position = positions.get(id(module))
                if position is None:
                    position = positions[id(module)] = len(modules)
                    modules.append(module)
                    submodules.append((parent, name, position))
                    waiting.append((position, iter(list(module._modules.items()))))
                    break
                submodules.append((parent, name, position))
            else:
                waiting.pop()
        return cls(
            modules,
            tuple(submodules),
            *_placed(
                (at, name, tensor)
                for at, module in enumerate(modules)
                for name, tensor in module._parameters.items()
            ),
            *_placed(
                (at, name, tensor)
                for at, module in enumerate(modules)
                for name, tensor in module._buffers.items()
            ),
        )


def _placed(
    found: Iterator[tuple[int, str, torch.Tensor | None]],
) -> tuple[list[torch.Tensor], Any]:
    """The tensors, each once, and their places."""
    tensors: list[torch.Tensor] = []
    positions: dict[int, int] = {}
    places: list[tuple[int, str, int | None]] = []
    for at, name, tensor in found:
        position = None
        if tensor is not None:
            position = positions.setdefault(id(tensor), len(tensors))
            if position == len(tensors):
                tensors.append(tensor)
        places.append((at, name, position))
    return tensors, tuple(places)
