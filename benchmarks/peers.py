"""What PyTorch's own partitioner would keep, as schedules that our judge can play.

`torch._functorch.partitioners` with `activation_memory_budget` b (a share of the activations) and
one of its knapsack solvers chooses which tensors the forward pass saves for the backward pass. The
set is played as what it means: keep these, recompute the rest right before it is needed
(`solver.schedule.recompute.keep`). Its budget is a ratio and says nothing about the peak, so a
sweep over ratios is made once per graph, and at a budget in bytes the fastest schedule that fits
counts.
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

Traces = Mapping[str, tuple[Simulation, ...]]
"""By solver of the partitioner: what the judge says of its sets, for each ratio."""


def partitioned(step: CapturedStep, *, time_limit_s: float) -> Traces:
    """The partitioner's sets on the joint graph of this step, judged; as many as there is time."""
    deadline_s = time.monotonic() + time_limit_s
    traces: dict[str, tuple[Simulation, ...]] = {f"torch {solver}": () for solver in SOLVERS}
    for ratio in RATIOS:
        for solver in SOLVERS:
            if time.monotonic() < deadline_s:
                kept = _saved(step, solver, ratio)
                traces[f"torch {solver}"] += (simulate(step.graph, keep(step.graph, kept)),)
    return traces


def best_overhead(graph: Graph, traces: Iterable[Simulation], *, budget_bytes: int) -> float | None:
    """The least overhead of those that fit; None: none does."""
    times_s = [simulation.time_s for simulation in traces if simulation.peak_bytes <= budget_bytes]
    return min(times_s) / graph.baseline_time_s - 1.0 if times_s else None


def _saved(step: CapturedStep, solver: str, ratio: float) -> frozenset[str]:
    """The storages that the partitioner's forward part hands to its backward part."""
    captured = step.captured
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    joint = torch.fx.GraphModule(captured.module, graph)
    n_outputs = sum(
        isinstance(desc, _FORWARD_OUTPUTS) for desc in captured.graph.output_node().meta["desc"]
    )
    for new, old in zip(graph.nodes, captured.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    options = {"activation_memory_budget": ratio, "activation_memory_budget_solver": solver}
    with config.patch(options), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward, _ = partitioners.min_cut_rematerialization_partition(
            joint, (), num_fwd_outputs=n_outputs
        )
    kept = pytree.tree_leaves(forward.graph.output_node().args[0])[n_outputs:]
    by_name = {node.name: node for node in captured.graph.nodes}
    storage = step.layout.storage
    return frozenset(
        storage[by_name[node.name]]
        for node in kept
        if isinstance(node, torch.fx.Node)
        and node.name in by_name
        and by_name[node.name] in storage
    )
