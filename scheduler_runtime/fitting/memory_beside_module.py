"""The memory on the device that is not the planned module's, but is part of the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.costs import CostModel
from graphs.graph import Graph
from graphs.model_calls import device_of
from graphs.training_step import combined_figures, optimizer_costs, with_optimizer, with_resident
from scheduler_runtime.measuring import bytes_of, resident_tensors
from scheduler_runtime.surroundings import Buckets


@dataclass(frozen=True)
class OtherMemory:
    """What a step has on the device besides the planned module.

    optimizers: costs of the optimizers, as `optimizer_costs` returns them.
    rest_bytes: parameters and buffers of the whole module outside of the planned part.
    bucket_bytes: gradient buckets that are separate from the gradients.
    """

    optimizers: tuple[Mapping[str, Any], ...]
    rest_bytes: int
    bucket_bytes: int

    @classmethod
    def of(
        cls,
        part: nn.Module,
        whole: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        costs: CostModel,
        *,
        buckets: Buckets | None,
    ) -> OtherMemory:
        """part: the planned module. whole: the module that contains it, or itself."""
        device = device_of(part)
        in_whole, in_part = (
            bytes_of(resident_tensors(each, (), ()), device) for each in (whole, part)
        )
        return cls(
            optimizers=tuple(
                optimizer_costs(each, part, device=device, costs=costs) for each in optimizers
            ),
            rest_bytes=in_whole - in_part,
            bucket_bytes=0 if buckets is None else buckets.separate_bytes,
        )

    def add_to(self, graph: Graph) -> Graph:
        """Add all of this to the graph of the module."""
        graph = with_resident(graph, "rest_of_the_module", self.rest_bytes)
        graph = with_optimizer(graph, combined_figures(self.optimizers))
        return with_resident(graph, "gradient_buckets", self.bucket_bytes)
