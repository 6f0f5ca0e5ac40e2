"""Several cuts, their replay, and the menu: what each of them claims, on nets with skips."""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import pytest

from graphs.graph import Graph
from solver.bound.cut import CutMilp, solve_cuts
from solver.bound.lower_bound import binding_cut
from solver.bound.storage_graph import StorageGraph
from solver.methods import find_obstacle
from solver.methods.auto.from_cuts import fold_simulation, schedule_from_cuts
from solver.methods.auto.menu_program import menu_program
from solver.methods.auto.recombine import recombine
from solver.methods.auto.search import Search
from solver.methods.auto.several_cuts import offer_several_cuts
from solver.methods.auto_method import auto
from solver.methods.evict import evict
from solver.schedule.simulator import simulate
from tests.support.budgets import budget_above_least
from tests.support.synthetic_graphs import (
    dense,
    pyramid,
    random_dag,
    residual,
    transformer,
    u_shape,
)

stages = importlib.import_module("solver.methods.auto.stages")

NETS = {
    "residual": residual(n_blocks=8),
    "transformer": transformer(n_layers=3),
    "u_shape": u_shape(depth=4),
    "pyramid": pyramid(n_blocks=(1, 2, 1)),
    "dense": dense(n_layers=8),
}


def lp_share(folded: StorageGraph, positions: list[int], budget_bytes: int) -> float:
    return solve_cuts(
        folded, positions=positions, budget_bytes=budget_bytes, as_milp=False
    ).lost_share


@pytest.mark.parametrize("name", NETS)
def test_several_cuts_bound_as_well_as_each_alone_already_as_an_lp(name: str) -> None:
    graph = NETS[name]
    folded = StorageGraph.of(graph)
    rng = random.Random(0)
    for share in (0.2, 0.5):
        budget_bytes = budget_above_least(graph, share)
        full = [p for p in range(folded.n_nodes) if folded.baseline_bytes[p] > budget_bytes]
        positions = sorted(rng.sample(full, min(4, len(full))))
        alone = max(lp_share(folded, [p], budget_bytes) for p in positions)
        assert lp_share(folded, positions, budget_bytes) >= alone - 1e-6


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", NETS)
def test_the_replay_loses_no_more_than_the_cuts_counted(name: str) -> None:
    graph = NETS[name]
    folded = StorageGraph.of(graph)
    budget_bytes = budget_above_least(graph, 0.4)
    full = list(range(folded.n_forward, folded.n_nodes))
    positions = full[:: max(1, len(full) // 4)]
    cuts = solve_cuts(
        folded, positions=positions, budget_bytes=budget_bytes, as_milp=True, gap=1e-3
    )
    lost_s = (
        fold_simulation(folded, schedule_from_cuts(folded, cuts.kept)).simulation.time_s
        - graph.baseline_time_s
    )
    assert lost_s <= (cuts.cost_share + 1e-6) * graph.baseline_time_s


@pytest.mark.parametrize("seed", range(40))
def test_a_rounded_cut_fits_and_costs_what_it_says(seed: int) -> None:
    graph = random_dag(seed=seed, n_forward=8, n_later=6)
    folded = StorageGraph.of(graph)
    budget_bytes = budget_above_least(graph, 0.3)
    for p in range(folded.n_forward, folded.n_nodes):
        program = CutMilp(folded, positions=[p], budget_bytes=budget_bytes)
        cuts = program.solve_lp_and_round()
        if cuts.kept is None or math.isinf(cuts.cost_share):
            continue
        kept = cuts.kept[p]
        held_bytes = sum(folded.unit_bytes[u] for u in kept if not folded.is_pinned(u, p))
        held_bytes += int(folded.held_bytes[p] + folded.own_bytes[p])
        assert held_bytes <= budget_bytes
        assert cuts.cost_share >= cuts.lost_share - 1e-9
        assert all(u in kept for u in folded.reads[p] if folded.maker[u] < folded.n_forward)


def searched(graph: Graph, share: float) -> tuple[Search, int]:
    """A search whose menu holds what cuts and evictions recomputed, and the position that binds."""
    folded = StorageGraph.of(graph)
    search = Search(folded, budget_bytes=budget_above_least(graph, share), time_limit_s=math.inf)
    binding = binding_cut(folded, budget_bytes=search.budget_bytes)
    search.prove(binding.lost_share)
    guide = offer_several_cuts(search, binding.cuts)
    for patience in (0.5, 1.0, 2.0):
        for chosen in (guide, {}):
            schedule, _ = evict(
                folded, budget_bytes=search.budget_bytes, guide=chosen, patience=patience
            )
            if schedule is not None:
                search.offer(schedule)
    return search, binding.ranked_positions[0][0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["u_shape", "residual", "pyramid"])
def test_the_menu_gives_no_worse_than_what_made_it(name: str) -> None:
    search, base = searched(NETS[name], 0.2)
    before = search.best_share
    nodes = {n for menu in search.menus for n, _ in menu}
    recombine(search, base=base)
    assert search.lost_share - 1e-6 <= search.best_share <= before
    assert simulate(NETS[name], search.best[0]).peak_bytes <= search.budget_bytes
    assert {n for n, _ in fold_simulation(search.folded, search.best[0]).recomputed} <= nodes


@pytest.mark.exhaustive
def test_the_menu_is_worth_its_time_where_skips_are_long() -> None:
    search, base = searched(NETS["u_shape"], 0.15)
    before = search.gap
    recombine(search, base=base)
    assert search.gap < 0.5 * before


def test_menus_grow_from_what_the_best_schedule_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short program is solved well where a long one stops at its root."""
    folded = StorageGraph.of(NETS["transformer"])
    search = Search(
        folded, budget_bytes=budget_above_least(NETS["transformer"], 0.3), time_limit_s=math.inf
    )
    schedule, _ = evict(folded, budget_bytes=search.budget_bytes, patience=1.0)
    assert schedule is not None
    found = search.offer(schedule)
    n_best = len(found.recomputed)
    for n in range(n_best):
        search.menus[frozenset({(n, 1000), (n, 1001), (n, 1002)})] = None
    tried = menus_tried(search, monkeypatch, long=math.inf, _menus_from_lp=lambda *_: ())
    assert [len(menu) for menu in tried[:2]] == [n_best + 3, pytest.approx(2 * n_best + 6, abs=2)]
    assert frozenset().union(*search.menus) == frozenset().union(*tried)
    assert all(found.recomputed < menu for menu in tried)
    search.menus[frozenset((n, 1000) for n in range(100 * n_best))] = None
    whole = menus_tried(search, monkeypatch, long=math.inf, _menus_from_lp=lambda *_: ())
    short = menus_tried(search, monkeypatch, long=2.5, _menus_from_lp=lambda *_: ())
    assert short == [menu for menu in whole if len(menu) <= 2.5 * n_best] != whole


def menus_tried(
    search: Search, monkeypatch: pytest.MonkeyPatch, *, long: float = 2.5, **replaced: Any
) -> list[frozenset[tuple[int, int]]]:
    """The menus that are offered where none of them gives anything."""
    module = importlib.import_module("solver.methods.auto.recombine")
    tried: list[frozenset[tuple[int, int]]] = []

    def record(_search: Search, menu: frozenset[tuple[int, int]], _base: int) -> int:
        tried.append(menu)
        return 0

    replaced = {
        "_offer_best": record,
        "MAX_MENU_ENTRIES": 0,
        "MAX_MENU_MULTIPLE": long,
        "MAX_FULL_MENU": 0,
    } | replaced
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, value)
    recombine(search, base=search.folded.n_forward)
    return tried


@pytest.mark.slow
def test_all_that_was_seen_comes_first_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short menus alone lead astray; a long one would take half a minute."""
    search, _ = searched(NETS["pyramid"], 0.15)
    best = fold_simulation(search.folded, search.best[0]).recomputed
    everything = best.union(*search.menus)
    whole, rest = (
        menus_tried(search, monkeypatch, MAX_FULL_MENU=len(everything) - longer)
        for longer in (0, 1)
    )
    assert whole[0] == everything != rest[0]
    assert whole[1:] == [menu for menu in rest if menu != everything]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["u_shape", "pyramid"])
def test_the_linear_program_of_all_menus_picks_what_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses no more on the menu of what it uses, which is much shorter; no menu comes twice."""
    search, _ = searched(NETS[name], 0.15)
    everything = frozenset().union(*search.menus)
    tried = menus_tried(search, monkeypatch, _menus_of_similar_schedules=lambda _: ())
    best = fold_simulation(search.folded, search.best[0]).recomputed
    assert tried
    assert len(set(tried)) == len(tried)
    assert best < tried[0] < everything | best
    assert len(tried[0]) < 0.8 * len(everything | best)
    whole, picked = (
        menu_program(search, menu, base=search.folded.n_forward).program.solve(as_milp=False).bound
        for menu in (everything | best, tried[0])
    )
    assert picked == pytest.approx(whole, abs=1e-6)


def test_a_long_menu_is_left_alone() -> None:
    search, base = searched(NETS["u_shape"], 0.3)
    best = search.best
    search.menus = {frozenset((n, p) for n in range(60) for p in range(60, 120)): None}
    recombine(search, base=base)
    assert search.best is best


@pytest.mark.slow
def test_the_menu_is_of_the_search_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of other budgets, with other recomputation, would make it too long to solve."""
    menus = []
    monkeypatch.setattr(stages, "recombine", lambda search, base: menus.append([*search.menus]))
    graph = residual(n_blocks=5)
    least = find_obstacle(graph).schedule
    assert least is not None
    for starts in ((), (least,)):
        auto(
            graph,
            budget_bytes=budget_above_least(graph, 0.2),
            time_limit_s=600,
            seed=0,
            starts=starts,
        )
    alone, started = menus
    assert started == alone
