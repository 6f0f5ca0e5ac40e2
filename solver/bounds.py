"""Lower bounds (placeholder of the package's first commit: the sum of all times)."""

from __future__ import annotations

from graphs.graph import Graph
from solver.solution import Obstacle


def lower_bound_s(graph: Graph, *, budget_bytes: int, time_limit_s: float = 10.0) -> float:
    return graph.baseline_time_s


def obstacle(graph: Graph) -> Obstacle:
    return Obstacle(0, None, "", ())
