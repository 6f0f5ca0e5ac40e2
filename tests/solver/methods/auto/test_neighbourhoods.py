"""Large neighbourhood search: what it frees, what its rows count; plans only get better."""

from __future__ import annotations

import math

import pytest

from graphs.graph import Graph
from solver.bound.lower_bound import binding_cut, proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.methods.auto import neighbourhoods
from solver.methods.auto.from_cuts import fold_simulation
from solver.methods.auto.menu_program import Menu, menu_program, recomputed_by_best
from solver.methods.auto.neighbourhoods import refine, search_neighbourhoods
from solver.methods.auto.recompute_rows import add_recompute_rows
from solver.methods.auto.search import Search
from solver.methods.least_budget import least_schedule
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.nets import dense, pyramid, residual, transformer, u_shape

NETS = {
    "transformer": transformer(n_layers=2),
    "pyramid": pyramid(n_blocks=(1, 1, 1)),
    "dense": dense(n_layers=5),
    "residual": residual(n_blocks=5),
    "u_shape": u_shape(depth=3),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "MAX_ENTRIES", 100)
    monkeypatch.setattr(neighbourhoods, "MAX_IN_VAIN", 2)


def searched(graph: Graph) -> tuple[Search, int]:
    """A search near the least budget whose best schedule reaches it, and the position that binds.

    Such a schedule wastes time: it goes for few bytes alone.
    """
    folded = StorageGraph.of(graph)
    proven_bytes = proven_least_budget_bytes(folded)[0]
    schedule, reached_bytes = least_schedule(folded, proven_bytes=proven_bytes)
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    budget_bytes = reached_bytes + (peak_bytes - reached_bytes) // 10
    search = Search(folded, budget_bytes=budget_bytes, time_limit_s=math.inf)
    binding = binding_cut(folded, budget_bytes=budget_bytes)
    search.prove(binding.lost_share)
    assert search.offer(schedule) is not None
    return search, binding.ranked[0][0]


@pytest.mark.slow
def test_plans_get_better_and_fit() -> None:
    left = []
    for graph in NETS.values():
        search, base = searched(graph)
        before, gap_before = search.best_share, search.gap
        search_neighbourhoods(search, base=base)
        assert search.lost_share - 1e-6 <= search.best_share <= before
        assert search.best is not None
        assert simulate(graph, search.best[0]).peak_bytes <= search.budget_bytes
        left.append(search.gap / gap_before)
    assert min(left) < 0.5
    assert max(left) < 1.0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", NETS)
def test_with_its_rows_what_the_program_finds_fits_at_once(name: str) -> None:
    """Everything that the best schedule recomputes may be recomputed at each of its places."""
    search, base = searched(NETS[name])
    best = recomputed_by_best(search)
    menu = Menu((n, p) for n in {n for n, _ in best} for _, p in best)
    program = menu_program(search, menu, base=base)
    add_recompute_rows(program)
    kept = program.solve(below=math.inf)
    assert kept is not None
    found = search.offer_cuts(kept)
    assert found is not None
    assert found.simulation.peak_bytes <= search.budget_bytes


@pytest.mark.slow
def test_without_its_rows_it_overflows_somewhere() -> None:
    over = 0
    for graph in NETS.values():
        search, base = searched(graph)
        best = recomputed_by_best(search)
        menu = Menu((n, p) for n in {n for n, _ in best} for _, p in best)
        kept = menu_program(search, menu, base=base).solve(below=math.inf)
        assert kept is not None
        found = search.offer_cuts(kept)
        over += found is not None and found.simulation.peak_bytes > search.budget_bytes
    assert over


@pytest.mark.parametrize("name", NETS)
def test_windows_begin_where_something_is_recomputed(name: str) -> None:
    search, _ = searched(NETS[name])
    folded, best = search.folded, recomputed_by_best(search)
    windows = [*neighbourhoods._Steps(search).windows(best)]
    assert [each.first for each in windows] == sorted({p for _, p in best})
    for each in windows:
        positions = {p for _, p in each.menu}
        assert len(each.menu) <= neighbourhoods.MAX_ENTRIES or len(positions) == 1
        assert all(each.first <= p <= each.last for p in positions)
        assert all(folded.recomputable[n] for n, _ in each.menu)
        assert each.recomputed == {(n, p) for n, p in best if each.first <= p <= each.last}


def test_far_from_the_window_the_schedule_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "MAX_IN_VAIN", 1)
    monkeypatch.setattr(neighbourhoods, "MAX_ENTRIES", 30)
    monkeypatch.setattr(Search, "offer_improved", lambda *_: None)
    search, base = searched(NETS["residual"])
    before = recomputed_by_best(search)
    window = max(
        neighbourhoods._Steps(search).windows(before),
        key=lambda each: (each.lost_share, -each.first),
    )
    near = sorted({p for _, p in before if p > window.last})[: neighbourhoods.N_NEAR]
    neighbourhoods._offer_best(search, window, before, base)
    assert search.best is not None
    after = fold_simulation(search.folded, search.best[0]).recomputed
    far = max([*near, window.last])
    assert {e for e in before if e[1] > far} >= {e for e in after if e[1] > far}


def test_long_schedules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "MAX_MENU", neighbourhoods.MAX_ENTRIES)
    monkeypatch.setattr(neighbourhoods, "_offer_best", lambda *_: pytest.fail("solved"))
    search, base = searched(NETS["residual"])
    search_neighbourhoods(search, base=base)


def test_refining_ends_at_once_where_the_gap_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        neighbourhoods, "search_neighbourhoods", lambda *_, **__: pytest.fail("searched")
    )
    search, _ = searched(NETS["residual"])
    assert search.best is not None
    schedule, simulation = search.best
    proposal = refine(
        search.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=math.inf,
        starts=[schedule],
        proven_s=simulation.time_s - 0.04 * search.graph.baseline_time_s,
    )
    assert proposal.schedule is schedule
    assert not proposal.timed_out


def test_no_time_leaves_what_is_known() -> None:
    search, _ = searched(NETS["residual"])
    assert search.best is not None
    proposal = refine(
        search.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=0.0,
        starts=[search.best[0]],
        proven_s=0.0,
    )
    assert proposal.schedule is search.best[0]
    assert proposal.timed_out
