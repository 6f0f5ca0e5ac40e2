"""The stages of `auto` one by one: how much eviction there is, and when windows are solved."""

import math
from typing import Any

import pytest

from solver.bound.lower_bound import binding_cut
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import windows_share
from solver.methods.auto import stages
from solver.methods.auto.search import Search
from solver.methods.least_budget import PATIENCE, find_obstacle
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.nets import recurrent, u_shape


@pytest.mark.parametrize(("n_steps", "n_tried"), [(20, 1), (300, len(PATIENCE))])
def test_large_graphs_have_work_for_each_patience(
    n_steps: int, n_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def costly(*_: object, patience: float, **__: Any) -> tuple[None, int]:
        tried.append(patience)
        return None, stages.MAX_WORK

    monkeypatch.setattr(stages, "evict", costly)
    graph = recurrent(n_steps=n_steps)
    least_bytes = simulate(graph, baseline(graph)).peak_bytes
    search = Search(StorageGraph.of(graph), budget_bytes=least_bytes, time_limit_s=math.inf)
    with search:
        search.offer(baseline(graph))
        search.lost_share = -1.0  # far from the bound: something is left to search
        stages._evict(search)
    assert tried == list(PATIENCE[:n_tried])


@pytest.mark.slow
def test_a_wide_gap_is_narrowed_by_windows() -> None:
    graph = u_shape(depth=3)
    folded, budget_bytes = StorageGraph.of(graph), find_obstacle(graph).reached_bytes
    found = stages.recompute_only(graph, budget_bytes=budget_bytes, time_limit_s=math.inf)
    base = binding_cut(folded, budget_bytes=budget_bytes).ranked[0][0]
    proven = windows_share(folded, budget_bytes=budget_bytes, base=base)
    assert found.lower_bound_s >= graph.baseline_time_s * (1 + proven)
