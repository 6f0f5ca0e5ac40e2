"""The methods by name. Each proposes; `solver.solve` has every proposal judged."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.graph import Graph
from solver.methods.auto import auto
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.ilp import ilp
from solver.methods.proposal import Method, Proposal, WarmMethod
from solver.methods.revolve import revolve
from solver.methods.sqrt import sqrt
from solver.schedule import baseline, simulate


def none(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """No checkpointing: each node once, in the framework's order; optimal when it fits."""
    schedule = baseline(graph)
    simulation = simulate(graph, schedule)
    return Proposal(
        schedule=schedule if simulation.peak_bytes <= budget_bytes else None,
        lower_bound_s=graph.baseline_time_s,
    )


METHODS: Mapping[str, Method] = {
    "auto": auto,
    "none": none,
    "every_block": every_block,
    "sqrt": sqrt,
    "revolve": revolve,
    "dp": dp,
    "ilp": ilp,
}

WARM_METHODS: Mapping[str, WarmMethod] = {"auto": auto}
"""Those that can begin from schedules that are known."""
