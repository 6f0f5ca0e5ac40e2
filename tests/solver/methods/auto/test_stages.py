"""The stages of `auto` one by one: how much eviction there is, and when windows are solved."""

import math
from typing import Any

import pytest

from graphs.graph import Graph
from solver.bound.lower_bound import binding_cut
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import lost_share_by_windows
from solver.methods.auto import stages
from solver.methods.auto.search import Search
from solver.methods.evict import evict
from solver.methods.least_budget import PATIENCE, find_obstacle
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import deadline as clock
from solver.sizes_deadlines_progress.deadline import Deadline, OutOfTimeError
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.synthetic_graphs import pyramid, recurrent, u_shape


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
    least_bytes = baseline_peak_bytes(graph)
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
    base = binding_cut(folded, budget_bytes=budget_bytes).ranked_positions[0][0]
    proven = lost_share_by_windows(folded, budget_bytes=budget_bytes, base=base)
    assert found.lower_bound_s >= graph.baseline_time_s * (1 + proven)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize(
    "graph", [recurrent(n_steps=30), u_shape(depth=3), pyramid()], ids=["recurrent", "u", "pyramid"]
)
def test_what_fits_is_found_where_the_time_was_up_from_the_start(
    graph: Graph, share: float
) -> None:
    budget_bytes = budget_above_resident(graph, share)
    found = stages.recompute_only(graph, budget_bytes=budget_bytes, time_limit_s=0.0)
    assert found.timed_out
    assert simulate(graph, found.schedule).peak_bytes <= budget_bytes


def test_a_slow_schedule_is_not_all_that_a_short_limit_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock ends the search in the stage that found it, before the first eviction."""
    graph = pyramid()
    folded, budget_bytes = StorageGraph.of(graph), budget_above_resident(graph, 0.8)
    slow, _ = evict(folded, budget_bytes=budget_above_resident(graph, 0.35))
    evicted, _ = evict(folded, budget_bytes=budget_bytes)

    def stage(search: Search) -> None:
        search.fits(slow)
        raise OutOfTimeError

    monkeypatch.setattr(stages, "CHEAP_STAGES", (stage,))
    found = stages.recompute_only(graph, budget_bytes=budget_bytes, time_limit_s=600.0)
    assert simulate(graph, slow).time_s > simulate(graph, evicted).time_s
    assert simulate(graph, found.schedule).time_s <= simulate(graph, evicted).time_s


def test_a_search_that_ends_by_itself_makes_no_late_eviction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "_fallback_after_time_limit", None)  # would fail if it were called
    graph = pyramid(n_blocks=(1, 1))
    options = {"budget_bytes": budget_above_resident(graph, 0.5), "time_limit_s": 600.0}
    assert not stages.recompute_only(graph, **options).timed_out
    stages.recompute_only(graph, budget_bytes=options["budget_bytes"], time_limit_s=0.0, quick=True)


def test_a_least_budget_below_the_plain_step_is_found_after_the_deadline() -> None:
    graph = pyramid()
    late = find_obstacle(graph, deadline=Deadline(clock.now_s() - 1.0))
    assert late.cut_short
    assert late.reached_bytes < baseline_peak_bytes(graph)
