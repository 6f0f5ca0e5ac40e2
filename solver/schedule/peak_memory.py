"""Bytes on the device at the peak of the baseline and of the plan, by category.

Tables and advice use the same object, so that their figures agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from graphs.graph import Graph, Node
from solver.schedule.memory import activation_bytes_by_dtype, memory_at, node_at
from solver.schedule.ops import Compute, Schedule
from solver.schedule.simulation import Simulation

STATE = ("parameters", "gradients", "optimizer")
"""The categories that recomputation cannot free."""


@dataclass(frozen=True)
class PeakMemory:
    """What is on the device at the peak of one schedule. name: "baseline" or "plan"."""

    name: str
    graph: Graph = field(repr=False)
    schedule: Schedule
    simulation: Simulation

    @cached_property
    def node(self) -> Node | None:
        """The peak op (None: before the first op)."""
        return node_at(self.graph, self.schedule, self.simulation)

    @cached_property
    def bytes_of(self) -> Mapping[str, int]:
        """Category -> bytes; they add up to the schedule's peak."""
        return memory_at(self.graph, self.schedule, self.simulation.peak_op)

    @cached_property
    def activations_of(self) -> Mapping[str, int]:
        """Dtype -> bytes of activations; empty if the graph does not record dtypes."""
        return activation_bytes_by_dtype(self.graph, self.schedule, self.simulation.peak_op)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of.values())

    def share(self, *categories: str) -> float:
        """The share of the peak that these categories take together."""
        return sum(self.bytes_of[name] for name in categories) / (self.total_bytes or 1)

    def bytes_at_the_end(self) -> Mapping[str, int]:
        """Category -> bytes during the last compute, when all gradients that the step leaves are
        on the device."""
        computes = [p for p, op in enumerate(self.schedule.ops) if isinstance(op, Compute)]
        return memory_at(self.graph, self.schedule, computes[-1] if computes else None)
