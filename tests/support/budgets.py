"""Budgets at a share of the way up to what the step takes without recomputing anything."""

from __future__ import annotations

from graphs.graph import Graph
from solver.bound import StorageGraph, proven_least_budget_bytes
from solver.schedule import baseline, simulate


def baseline_peak_bytes(graph: Graph) -> int:
    return simulate(graph, baseline(graph)).peak_bytes


def budget_above_resident(graph: Graph, share: float) -> int:
    """0: what is resident; 1: the baseline's peak."""
    return graph.resident_bytes + int(share * (baseline_peak_bytes(graph) - graph.resident_bytes))


def budget_above_least(graph: Graph, share: float) -> int:
    """0: the least budget of any schedule, as far as it is proven; 1: the baseline's peak."""
    least_bytes, _ = proven_least_budget_bytes(StorageGraph.of(graph))
    return least_bytes + int(share * (baseline_peak_bytes(graph) - least_bytes))
