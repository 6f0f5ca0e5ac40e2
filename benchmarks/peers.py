"""What PyTorch's own partitioner would save for backward, as schedules that can be simulated.

`torch._functorch.partitioners`, given an `activation_memory_budget` (a ratio: a share of the
activations) and one of its knapsack solvers, chooses which tensors the forward pass saves for
backward. `solver.schedule.keep` turns this set into a schedule: keep these tensors, recompute the
others right before they are needed. A ratio says nothing about the peak, so we try several ratios
per graph, and for a budget in bytes take the fastest of the schedules that fit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd import descriptors
from torch.utils import _pytree as pytree

from graphs.graph import Graph
from graphs.trace import CapturedStep
from solver.schedule import Simulation, keep, simulate

SOLVERS = ("dp", "greedy", "ilp")
_FORWARD_OUTPUTS = (
    descriptors.PlainAOTOutput,
    descriptors.InputMutationAOTOutput,
    descriptors.IntermediateBaseAOTOutput,
)
RATIOS = (0.5, 0.7, 0.3, 0.9, 0.1, 0.8, 0.6, 0.4, 0.2, 0.0, 0.95, 0.05)

Simulations = Mapping[str, tuple[Simulation, ...]]
"""Name of the partitioner's solver -> simulations of the sets that it chose, one per ratio."""


def simulate_partitions(step: CapturedStep, *, time_limit_s: float) -> Simulations:
    """Simulate the sets that the partitioner chooses for this step, for as many RATIOS as the time
    limit allows."""
    deadline_s = time.monotonic() + time_limit_s
    found: dict[str, tuple[Simulation, ...]] = {f"torch {solver}": () for solver in SOLVERS}
    for ratio in RATIOS:
        for solver in SOLVERS:
            if time.monotonic() < deadline_s:
                kept = _saved_storages(step, solver, ratio)
                found[f"torch {solver}"] += (simulate(step.graph, keep(step.graph, kept)),)
    return found


def best_overhead(graph: Graph, found: Iterable[Simulation], *, budget_bytes: int) -> float | None:
    """The least overhead of the simulations within the budget; None if there are none."""
    times_s = [simulation.time_s for simulation in found if simulation.peak_bytes <= budget_bytes]
    return min(times_s) / graph.baseline_time_s - 1.0 if times_s else None


def _saved_storages(step: CapturedStep, solver: str, ratio: float) -> frozenset[str]:
    """The storages that the partitioner's forward graph saves for its backward graph."""
    captured = step.captured
    # The partitioner changes its graph, so it gets a copy, with the metadata that it reads.
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    joint = torch.fx.GraphModule(captured.module, graph)
    for new, old in zip(graph.nodes, captured.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    n_outputs = sum(
        isinstance(desc, _FORWARD_OUTPUTS) for desc in captured.graph.output_node().meta["desc"]
    )
    options = {"activation_memory_budget": ratio, "activation_memory_budget_solver": solver}
    with config.patch(options), warnings.catch_warnings(action="ignore"):
        forward, _ = partitioners.min_cut_rematerialization_partition(
            joint, (), num_fwd_outputs=n_outputs
        )
    saved = pytree.tree_leaves(forward.graph.output_node().args[0])[n_outputs:]
    names = {node.name for node in saved if isinstance(node, torch.fx.Node)}
    storage = step.layout.storage
    return frozenset(
        storage[node] for node in captured.graph.nodes if node.name in names and node in storage
    )
