"""Memory layouts of tensors whose shape may vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.model_calls.tensors import same_strides


@dataclass(frozen=True)
class LayoutForShapes:
    """Where a tensor has its elements in memory, and where tensors of other shapes would have them.

    order: the dimensions, outermost first.
    gaps: shape and strides, if there are gaps between the elements; then they are known for this
        shape only. Tensors of other shapes are taken to have no gaps.
    """

    order: tuple[int, ...]
    gaps: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LayoutForShapes:
        shape, strides = tuple(tensor.shape), tensor.stride()
        without_gaps = cls(_order(strides))
        if same_strides(shape, strides, without_gaps.strides(shape)):
            return without_gaps
        return cls(without_gaps.order, (shape, strides))

    @classmethod
    def in_environment(cls, environment: Mapping[str, Any]) -> dict[int, LayoutForShapes]:
        """Index of an output -> layout of its gradient, from the environment of a traced graph.

        Files of earlier versions have the strides for the planned shape.
        """
        found = {
            at: cls(_order(strides)) for at, strides in environment.get("gradient_strides", ())
        }
        for at, order, *gaps in environment.get("gradient_layouts", ()):
            shape_and_strides = [tuple(each) for each in gaps]
            found[at] = cls(
                tuple(order), (shape_and_strides[0], shape_and_strides[1]) if gaps else None
            )
        return found

    def described(self) -> list[list[int]]:
        """For files: the order of the dimensions and, if there are gaps, shape and strides."""
        return [list(self.order), *(list(each) for each in self.gaps or ())]

    def serves(self, shape: Sequence[int]) -> bool:
        """Whether it says anything of this shape, which has as many dimensions."""
        return len(shape) == len(self.order)

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a tensor of a shape that this serves."""
        if self.gaps is not None and self.gaps[0] == tuple(shape):
            return self.gaps[1]
        strides, n_inside = [0] * len(shape), 1
        for dimension in reversed(self.order):
            strides[dimension] = n_inside
            n_inside *= max(shape[dimension], 1)
        return tuple(strides)


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))
