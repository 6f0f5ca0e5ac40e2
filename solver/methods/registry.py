"""The methods by name. Each proposes a schedule, which `solver.solve` then simulates."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.graph import Graph
from solver.methods.auto import prove_more, refine
from solver.methods.auto_method import auto
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.in_flight import in_flight
from solver.methods.proposal import Method, Proposal
from solver.methods.revolve import revolve
from solver.methods.sqrt import sqrt
from solver.methods.storage_levels import METHODS_ON_LEVELS
from solver.schedule import baseline, simulate


def none(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """No checkpointing: each node runs once, in the framework's order; optimal if it fits."""
    schedule = baseline(graph)
    fits = simulate(graph, schedule).peak_bytes <= budget_bytes
    return Proposal(schedule if fits else None, lower_bound_s=graph.baseline_time_s)


def ilp(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """`solver.methods.ilp`, imported only when called, since PuLP is slow to import."""
    from solver.methods import ilp as module

    return module.ilp(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, seed=seed)


METHODS: Mapping[str, Method] = {
    "auto": Method(
        in_flight(auto, uses_milps=True),
        proves_bound=True,
        takes_starts=True,
        reaches_least_budget=True,
        op_by_op=True,
        takes_places=True,
        refine=refine,
        prove_more=prove_more,
    ),
    "none": Method(in_flight(none)),
    "every_block": Method(in_flight(every_block)),
    "sqrt": Method(in_flight(sqrt)),
    "revolve": Method(in_flight(revolve)),
    "dp": Method(in_flight(dp)),
    "ilp": Method(in_flight(ilp), proves_bound=True, op_by_op=True),
    **{
        name: Method(in_flight(method), takes_places=True, needs_places=True)
        for name, method in METHODS_ON_LEVELS.items()
    },
}
