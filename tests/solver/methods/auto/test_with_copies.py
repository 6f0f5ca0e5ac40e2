"""Copies placed on an order, and `auto` with a host beside the device."""

import random
from functools import partial
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.synthetic import nets
from solver.bound import StorageGraph
from solver.methods import find_obstacle
from solver.methods.auto import copy_placement, with_copies
from solver.methods.auto.copy_placement import find_gaps, longest_to_disk, place_copies
from solver.methods.auto.copy_search import CopySearch
from solver.methods.auto_method import auto
from solver.methods.proposal import Proposal
from solver.schedule import (
    CopyLayout,
    Link,
    Place,
    Places,
    Spill,
    Store,
    baseline,
    copy_layout,
    keep,
    simulate,
)
from solver.sizes_deadlines_progress import Deadline, OutOfTimeError
from tests.support.brute_force_copies import HostLink, TooManyStatesError, fastest
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.schedules_with_copies import never_stored
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import (
    chain,
    random_dag,
    residual,
    some_graph,
    some_not_copyable,
)


def host(bytes_per_s: float, capacity_bytes: int = 10**18, latency_s: float = 0.0) -> Places:
    return Places(host=Place(capacity_bytes, Link(bytes_per_s, bytes_per_s, latency_s)))


@pytest.mark.parametrize("first_seed", range(0, 600, 200))
def test_what_is_placed_is_legal_and_as_fast_and_as_large_as_said(first_seed: int) -> None:
    n_placed = n_fit = 0
    for seed in range(first_seed, first_seed + 200):
        graph = some_not_copyable(some_graph(seed), seed=seed)
        rng = random.Random(f"placed {seed}")
        order = keep(graph, [n for n in graph.producer if rng.random() < 0.6]).order
        folded = StorageGraph.of(graph)
        gaps = [gap for gap in find_gaps(folded, order) if rng.random() < 0.7]
        if not gaps:
            continue
        total_bytes = sum(folded.unit_bytes)
        rate = rng.choice((0.3, 1.0, 5.0)) * total_bytes / (graph.baseline_time_s or 1.0)
        places = host(rate, max(1, int(rng.choice((0.5, 2)) * total_bytes)), rng.choice((0, 0.1)))
        least_bytes = int(StorageGraph.of(graph, may_offload=True).least_bytes.max())
        budget_bytes = least_bytes + int(rng.random() * total_bytes)
        placed = place_copies(folded, order, gaps, budget_bytes=budget_bytes, places=places)
        simulation = simulate(graph, placed.schedule, places=places)
        assert simulation.time_s == pytest.approx(placed.time_s, rel=1e-9, abs=1e-12)
        assert (simulation.peak_bytes <= budget_bytes) == (not placed.over_bytes)
        assert simulation.host_peak_bytes <= places.host.capacity_bytes
        stored = {op.storage for op in placed.schedule.ops if isinstance(op, Store)}
        assert stored.isdisjoint(never_stored(graph))
        n_placed += placed.schedule.has_copies
        n_fit += not placed.over_bytes
    assert n_placed > 60
    assert n_fit > 30


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("first_seed", range(0, 900, 300))
def test_what_goes_on_to_the_disk_is_legal_and_as_fast_and_as_large_as_said(
    first_seed: int,
) -> None:
    n_spilled = n_fit = 0
    for seed in range(first_seed, first_seed + 300):
        graph, rng = some_graph(seed), random.Random(f"on disk {seed}")
        order = keep(graph, [n for n in graph.producer if rng.random() < 0.6]).order
        folded = StorageGraph.of(graph)
        gaps = [gap for gap in find_gaps(folded, order) if rng.random() < 0.8]
        if not gaps:
            continue
        total_bytes, largest_bytes = sum(folded.unit_bytes), max(folded.unit_bytes)
        rate = rng.choice((0.5, 2.0, 8.0)) * total_bytes / (graph.baseline_time_s or 1.0)
        link = Link(rate, rate * rng.choice((0.5, 1)), rng.choice((0, 0.1)))
        slower = Link(rate * rng.choice((0.2, 1)), rate / 2, rng.choice((0, 0.1)))
        host_bytes = max(largest_bytes, int(rng.choice((0.2, 0.4, 0.8)) * total_bytes))
        places = Places(Place(host_bytes, link), Place(total_bytes, slower))
        chosen = longest_to_disk(folded, gaps, places)
        if rng.random() < 0.5:
            chosen = frozenset(gap.unit for gap in gaps if rng.random() < 0.5)
        least_bytes = int(StorageGraph.of(graph, may_offload=True).least_bytes.max())
        budget_bytes = least_bytes + int(rng.random() * total_bytes)
        placed = place_copies(
            folded, order, gaps, budget_bytes=budget_bytes, places=places, to_disk=chosen
        )
        simulation = simulate(graph, placed.schedule, places=places)
        assert simulation.time_s == pytest.approx(placed.time_s, rel=1e-9, abs=1e-12)
        assert (simulation.peak_bytes <= budget_bytes) == (not placed.over_bytes)
        assert simulation.host_peak_bytes <= host_bytes
        spilled = {op.storage for op in placed.schedule.ops if isinstance(op, Spill)}
        assert spilled <= {folded.unit_names[u] for u in chosen}
        n_spilled += bool(spilled)
        n_fit += not placed.over_bytes
    assert n_spilled > 60
    assert n_fit > 30


def found(graph: Graph, proposal: Proposal, places: Places) -> float:
    """Seconds of the proposed schedule, which has to be legal."""
    return simulate(graph, proposal.schedule, places=places).time_s


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 120, 5))
def test_bound_truth_and_schedule_are_in_order(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 5):
        graph = random_dag(seed=seed, n_forward=seed % 3 + 2, n_later=seed % 2 + 2)
        graph = some_not_copyable(graph, seed=seed)
        folded = StorageGraph.of(graph, may_offload=True)
        rate = sum(folded.unit_bytes) / (graph.baseline_time_s or 1.0) or 1.0
        budget_bytes = (int(folded.least_bytes.max()) + baseline_peak_bytes(graph)) // 2
        options = {"budget_bytes": budget_bytes, "time_limit_s": 60.0, "seed": 0}
        proposal = auto(graph, places=host(rate), **options)
        alone = auto(graph, **options)
        if alone.schedule is not None:
            assert found(graph, proposal, host(rate)) <= found(graph, alone, host(rate)) + 1e-3
        try:
            link = HostLink(10**18, 1 / rate, 1 / rate)
            truth = fastest(graph, budget_bytes=budget_bytes, host=link, max_labels=3_000)
        except TooManyStatesError:
            continue
        assert proposal.lower_bound_s <= truth.time_s + 1e-9
        if proposal.schedule is not None:
            assert found(graph, proposal, host(rate)) >= truth.time_s - 1e-9


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("first_seed", range(0, 200, 5))
def test_bound_truth_and_schedule_are_in_order_with_a_disk(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 5):
        graph, rng = random_dag(seed=seed, n_forward=3, n_later=2), random.Random(seed)
        folded = StorageGraph.of(graph, may_offload=True)
        sizes = [*filter(None, folded.unit_bytes), 1]
        per_byte_s = (graph.baseline_time_s or 1.0) / sum(sizes) / rng.choice((1, 4))
        to_host = HostLink(rng.choice((min(sizes), max(sizes))), per_byte_s, per_byte_s)
        to_disk = HostLink(sum(sizes), per_byte_s, per_byte_s / 2)
        places = places_of(to_host, to_disk)
        budget_bytes = int(folded.least_bytes.max()) + rng.choice((0, 1, 3))
        options = {"budget_bytes": budget_bytes, "time_limit_s": 60.0, "seed": 0}
        behind = auto(graph, places=places, **options)
        beside = auto(graph, places=Places(host=places.host), **options)
        if beside.schedule is not None:
            assert found(graph, behind, places) <= found(graph, beside, places)
        try:
            truth = fastest(
                graph, budget_bytes=budget_bytes, host=to_host, disk=to_disk, max_labels=3_000
            )
        except TooManyStatesError:
            continue
        assert behind.lower_bound_s <= truth.time_s + 1e-9
        if behind.schedule is not None:
            simulation = simulate(graph, behind.schedule, places=places)
            assert simulation.peak_bytes <= budget_bytes
            assert simulation.host_peak_bytes <= places.host_bytes
            assert simulation.disk_peak_bytes <= places.disk_bytes
            assert simulation.time_s >= truth.time_s - 1e-9


def places_of(to_host: HostLink, to_disk: HostLink) -> Places:
    return Places(
        *(
            Place(each.capacity_bytes, Link(1 / each.out_s_per_byte, 1 / each.in_s_per_byte))
            for each in (to_host, to_disk)
        )
    )


def test_a_fast_link_makes_recomputation_needless() -> None:
    graph = residual(n_blocks=8)
    peak_bytes = baseline_peak_bytes(graph)
    options = {"budget_bytes": int(0.7 * peak_bytes), "time_limit_s": 60.0, "seed": 0}
    alone, beside = auto(graph, **options), auto(graph, places=host(1e14), **options)
    assert simulate(graph, alone.schedule).n_recomputed > 0
    simulation = simulate(graph, beside.schedule, places=host(1e14))
    assert simulation.n_recomputed == 0
    assert simulation.peak_bytes <= options["budget_bytes"]
    assert simulation.time_s == pytest.approx(graph.baseline_time_s, rel=1e-4)


def test_a_slow_link_is_left_alone_and_proven_not_to_help() -> None:
    graph = chain(n_blocks=50)
    options = {"budget_bytes": baseline_peak_bytes(graph) - 7000, "time_limit_s": 60.0, "seed": 0}
    proposal = auto(graph, places=host(1.0), **options)
    assert not proposal.schedule.has_copies
    assert found(graph, proposal, host(1.0)) == pytest.approx(107.0)
    assert proposal.lower_bound_s == pytest.approx(107.0, abs=2e-2)


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_recomputation_alone_is_found_where_the_clock_ends_the_search_for_copies(
    in_the_middle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_all_of_its_time(search: CopySearch) -> None:
        search.timed_out = True
        if in_the_middle:
            raise OutOfTimeError

    graph = chain(n_blocks=50)
    options = {"budget_bytes": baseline_peak_bytes(graph) - 7000, "time_limit_s": 600.0, "seed": 0}
    alone = auto(graph, **options)
    monkeypatch.setattr(with_copies, "COPY_STAGES", (takes_all_of_its_time,))
    proposal = auto(graph, places=host(1.0), **options)
    assert found(graph, proposal, host(1.0)) == found(graph, alone, host(1.0))
    # the bound was nearly met all the same
    assert proposal.timed_out == (
        found(graph, proposal, host(1.0)) > 1.0003 * proposal.lower_bound_s
    )


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_step_begins_with_recomputation_alone(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for name in ("COPY_STAGES", "RECOMPUTE_STAGES"):
        noted = partial(lambda name, _search: begun.append(name), name)
        monkeypatch.setattr(with_copies, name, (noted, *getattr(with_copies, name)))
    graph = chain(n_blocks=50)
    rate = len(graph.nodes) / 240.0  # 40 % of 600 s
    monkeypatch.setattr(with_copies, "NODES_PER_S", (0.9 if is_large else 1.1) * rate)
    proposal = with_copies.recompute_and_copy(
        graph,
        budget_bytes=baseline_peak_bytes(graph) - 7000,
        time_limit_s=600.0,
        places=host(1.0),
    )
    assert begun[0] == ("RECOMPUTE_STAGES" if is_large else "COPY_STAGES")
    assert found(graph, proposal, host(1.0)) == pytest.approx(107.0)


def test_the_host_is_not_overfilled() -> None:
    graph = residual(n_blocks=8)
    peak_bytes = baseline_peak_bytes(graph)
    most_bytes = peak_bytes // 10
    options = {"budget_bytes": int(0.7 * peak_bytes), "time_limit_s": 60.0, "seed": 0}
    places = host(1e14, capacity_bytes=most_bytes)
    proposal = auto(graph, places=places, **options)
    simulation = simulate(graph, proposal.schedule, places=places)
    assert 0 < simulation.host_peak_bytes <= most_bytes
    assert simulation.n_recomputed > 0


def test_without_a_host_auto_is_as_before() -> None:
    graph = residual(n_blocks=4)
    peak_bytes = baseline_peak_bytes(graph)
    options = {"budget_bytes": int(0.8 * peak_bytes), "time_limit_s": 60.0, "seed": 0}
    assert auto(graph, places=Places(), **options) == auto(graph, **options)


@pytest.mark.slow
def test_a_fast_host_costs_no_time_where_many_positions_overflow() -> None:
    graph = nets.residual(n_blocks=12)
    peak_bytes = baseline_peak_bytes(graph)
    least_bytes = find_obstacle(graph).reached_bytes
    budget_bytes = least_bytes + (peak_bytes - least_bytes) // 20
    rate = 8 * (peak_bytes - budget_bytes) / graph.baseline_time_s
    proposal = auto(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0, places=host(rate))
    simulation = simulate(graph, proposal.schedule, places=host(rate))
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.time_s < 1.001 * graph.baseline_time_s


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_copies_fit_side_by_side(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are refused whose copies leave gaps between them, and others are found."""
    graph = random_dag(seed=3, n_forward=40, n_later=40)
    budget_bytes = budget_above_resident(graph, 0.6)
    free = auto(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0, places=host(2e10))
    most_bytes = simulate(graph, free.schedule, places=host(2e10)).host_peak_bytes
    excesses = []

    def recorded(*args: Any) -> CopyLayout:
        layout = copy_layout(*args)
        excesses.append(layout.excess(args[2]))
        return layout

    monkeypatch.setattr(copy_placement, "copy_layout", recorded)
    places = host(2e10, int(share * most_bytes))
    found = auto(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0, places=places)
    assert not copy_layout(graph, found.schedule, places).excess(places)
    assert any(excesses)


def test_gradients_that_the_caller_computes_stay() -> None:
    """Of an output, held until the backward pass has come to where it is used: not a program's."""
    graph = make(
        [
            op("f", "", "x"),
            op("loss", "x", "early late", phase="outside"),
            op("b1", "early", "big", phase="backward"),
            op("b2", "big", "g", phase="backward"),
            op("b3", "late g", "h", phase="backward"),
        ],
        {"x": 1, "early": 1, "late": 50, "big": 60, "g": 1, "h": 1},
        outputs="x h",
    )
    folded = StorageGraph.of(graph)
    gaps = find_gaps(folded, baseline(graph).order)
    assert "late" not in {folded.unit_names[gap.unit] for gap in gaps}
    assert "early" not in {folded.unit_names[gap.unit] for gap in gaps}
    proposal = auto(graph, budget_bytes=70, time_limit_s=600, seed=0, places=host(1e9))
    assert proposal.schedule is None


def test_copies_take_the_place_of_recomputation_where_that_alone_was_best() -> None:
    """A graph on which no other stage finds a plan with copies that is faster."""
    graph = random_dag(seed=6, n_forward=12, n_later=8)
    least_bytes, peak_bytes = find_obstacle(graph).reached_bytes, baseline_peak_bytes(graph)
    budget_bytes = least_bytes + int(0.1 * (peak_bytes - least_bytes))
    total_bytes = sum(StorageGraph.of(graph).unit_bytes)
    places = host(0.3 * total_bytes / graph.baseline_time_s)
    times_s = []
    for beside in (None, places):
        proposal = auto(graph, budget_bytes=budget_bytes, time_limit_s=60.0, seed=0, places=beside)
        times_s.append(simulate(graph, proposal.schedule, places=beside).time_s)
    assert times_s[1] <= 1.1905 * graph.baseline_time_s < times_s[0]
    assert proposal.schedule.has_copies


@pytest.mark.parametrize("disk", [False, True])
def test_copies_alone_are_found_wherever_the_clock_ends_the_search(monkeypatch, disk: bool) -> None:
    """On deep steps the bound takes longer than a short time limit."""

    def no_time(*_: object, deadline: Deadline, **__: object) -> None:
        monkeypatch.setattr(Deadline, "passed", True)
        deadline.check()

    graph = nets.residual(n_blocks=12)
    monkeypatch.setattr(with_copies, "binding_copy_cut", no_time)
    plain = simulate(graph, baseline(graph))
    fast = host(4 * plain.peak_bytes / plain.time_s)
    places = Places(host=fast.host, disk=fast.host) if disk else fast
    budget_bytes = plain.peak_bytes * 6 // 10
    alone = auto(graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
    found = auto(graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0, places=places)
    step = simulate(graph, found.schedule, places=places)
    assert step.peak_bytes <= budget_bytes
    assert step.time_s < simulate(graph, alone.schedule).time_s
    assert found.schedule.has_copies
