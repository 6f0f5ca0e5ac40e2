"""Plan with copies and check the plan."""

from __future__ import annotations

from graphs.graph import Graph
from solver.methods.auto import with_copies as module
from solver.schedule import Places, simulate


def judged_s(graph: Graph, *, budget_bytes: int, places: Places) -> float:
    """Seconds of the step under the plan that `recompute_and_copy` proposes. Asserts that the plan
    is within the budget and not below the proposal's bound."""
    proposal = module.recompute_and_copy(
        graph, budget_bytes=budget_bytes, time_limit_s=6000, places=places
    )
    assert proposal.schedule is not None
    simulation = simulate(graph, proposal.schedule, places=places)
    assert simulation.peak_bytes <= budget_bytes
    assert proposal.lower_bound_s <= simulation.time_s + 1e-12
    return simulation.time_s
