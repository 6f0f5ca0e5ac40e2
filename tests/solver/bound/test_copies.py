"""The cut with copies: below the truth for every tiny graph, and below every schedule with copies.

A cell is a graph, a budget and a host with its link; the bound of every position is compared with
the exact least time.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

from graphs.graph import Graph
from solver.bound import CopyMilp, StorageGraph, solve_cuts
from solver.schedule import (
    IllegalScheduleError,
    Link,
    Place,
    Places,
    Schedule,
    Simulation,
    keep,
    simulate,
)
from tests.support.aliasing import aliasing_dag
from tests.support.brute_force_copies import HostLink, Optimum, TooManyStatesError, fastest
from tests.support.budgets import baseline_peak_bytes
from tests.support.overwriting import overwriting_dag
from tests.support.schedules_with_copies import random_copies, random_places
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag, some_not_copyable

CELLS_EACH = 10
MOST_UNITS, MOST_NODES, MOST_LABELS = 6, 7, 6_000


def small_dag(seed: int) -> Graph:
    rng = random.Random(seed)
    graph = random_dag(seed=seed, n_forward=rng.randint(2, 4), n_later=rng.randint(1, 3))
    return some_not_copyable(graph, seed=seed)


KINDS: dict[str, tuple[Callable[[int], Graph], int]] = {
    "dag": (small_dag, 170),
    "overwriting": (overwriting_dag, 45),
    "aliasing": (aliasing_dag, 20),
}
"""How the graphs are made, and how many times CELLS_EACH cells: 2,350; 700 more have a disk."""
CASES = [(kind, part) for kind, (_, parts) in KINDS.items() for part in range(parts)]
CASES.sort(key=lambda case: case[1])


def cells(kind: str, part: int) -> Iterator[tuple[Graph, int, HostLink]]:
    """Graphs with budgets from the least that one node needs to half-way to the baseline's peak."""
    seed = 100 * part
    while True:
        graph, rng = KINDS[kind][0](seed), random.Random(f"cells {seed}")
        seed += 1
        folded = StorageGraph.of(graph, may_offload=True)
        if folded.n_units > MOST_UNITS or folded.n_nodes > MOST_NODES:
            continue
        total_bytes, total_s = sum(folded.unit_bytes) or 1, graph.baseline_time_s or 1.0
        least_bytes = int(folded.least_bytes.max())
        peak_bytes = baseline_peak_bytes(graph)
        for budget_bytes in sorted(
            {least_bytes, least_bytes + 1, (3 * least_bytes + peak_bytes) // 4}
        ):
            out_s = total_s / total_bytes / rng.choice((0.3, 1, 3, 10))
            host_bytes = max(1, int(total_bytes * rng.choice((0.2, 0.5, 1))))
            in_s, latency_s = out_s / rng.choice((1, 2)), total_s * rng.choice((0, 0, 0.05))
            yield graph, budget_bytes, HostLink(host_bytes, out_s, in_s, latency_s)


def solved(
    tried: Iterator[tuple[Graph, int, HostLink]],
) -> Iterator[tuple[Graph, int, HostLink, Optimum]]:
    """Those that the search gets to the end of."""
    for graph, budget_bytes, host in tried:
        with suppress(TooManyStatesError):
            truth = fastest(graph, budget_bytes=budget_bytes, host=host, max_labels=MOST_LABELS)
            yield graph, budget_bytes, host, truth


def places_of(host: HostLink) -> Places:
    link = Link(1 / host.out_s_per_byte, 1 / host.in_s_per_byte, host.latency_s)
    return Places(host=Place(host.capacity_bytes, link))


def check_truth(graph: Graph, budget_bytes: int, places: Places, truth: Optimum) -> None:
    """The search obeys the simulator, and they agree on the time."""
    if truth.ops is None:
        return
    simulation = simulate(graph, truth.schedule(graph), places=places)
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.host_peak_bytes <= places.host_bytes
    assert simulation.disk_peak_bytes <= places.disk_bytes
    assert simulation.time_s == pytest.approx(truth.time_s, rel=1e-9, abs=1e-12)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_every_position_bounds_the_truth(kind: str, part: int) -> None:
    for graph, budget_bytes, host, truth in islice(solved(cells(kind, part)), CELLS_EACH):
        check_truth(graph, budget_bytes, places_of(host), truth)
        lost = truth.time_s / graph.baseline_time_s - 1 if graph.baseline_time_s else 0.0
        folded = StorageGraph.of(graph, may_offload=True)
        for p in range(1, folded.n_nodes + 1):
            program = CopyMilp(
                folded, position=p, budget_bytes=budget_bytes, places=places_of(host)
            )
            assert program.solve(as_milp=True).lost_share <= lost + 1e-9  # no less than its LP


DISK_UNITS, DISK_NODES = 5, 6
"""Of graphs that the search is to get through with a disk as well."""


def cells_with_disk(kind: str, part: int) -> Iterator[tuple[Graph, int, HostLink, HostLink]]:
    """A host that has room for a part, and a disk that is slower, or as fast."""
    for n, (graph, budget_bytes, host) in enumerate(cells(kind, part)):
        folded = StorageGraph.of(graph, may_offload=True)
        if folded.n_units > DISK_UNITS or folded.n_nodes > DISK_NODES:
            continue
        rng, sizes = random.Random(f"disk {kind} {part} {n}"), [*filter(None, folded.unit_bytes), 1]
        host_bytes = rng.choice((min(sizes), max(sizes), sum(sizes) // 2))
        out_s, in_s = host.out_s_per_byte * rng.choice((1, 2)), host.in_s_per_byte
        disk = HostLink(rng.choice((max(sizes), sum(sizes))), out_s, in_s, host.latency_s)
        yield graph, budget_bytes, replace(host, capacity_bytes=host_bytes), disk


def with_disk(host: HostLink, disk: HostLink) -> Places:
    return Places(host=places_of(host).host, disk=places_of(disk).host)


DISK_CASES = [
    (kind, part)
    for kind, parts in (("dag", 40), ("overwriting", 20), ("aliasing", 10))
    for part in range(parts)
]
DISK_CASES.sort(key=lambda case: case[1])


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(("kind", "part"), DISK_CASES)
def test_every_position_bounds_the_truth_with_a_disk(kind: str, part: int) -> None:
    n_solved = 0
    for graph, budget_bytes, host, disk in cells_with_disk(kind, part):
        places = with_disk(host, disk)
        try:
            truth = fastest(
                graph, budget_bytes=budget_bytes, host=host, disk=disk, max_labels=MOST_LABELS
            )
        except TooManyStatesError:
            continue
        n_solved += 1
        check_truth(graph, budget_bytes, places, truth)
        lost = truth.time_s / graph.baseline_time_s - 1 if graph.baseline_time_s else 0.0
        folded = StorageGraph.of(graph, may_offload=True)
        for p in range(1, folded.n_nodes + 1):
            program = CopyMilp(folded, position=p, budget_bytes=budget_bytes, places=places)
            assert program.solve(as_milp=True).lost_share <= lost + 1e-9
        if n_solved == CELLS_EACH:
            return


def schedules(n: int, *, first_seed: int) -> Iterator[tuple[Graph, Schedule, Places]]:
    """Legal schedules with recomputation and copies, by way of a disk too, and what they take."""
    seed = first_seed
    while n:
        rng = random.Random(f"schedule {seed}")
        kind = rng.choice((larger_dag, overwriting_dag, aliasing_dag))
        graph, places = kind(seed), random_places(rng)
        seed += 1
        storages = [name for name in graph.producer if graph.root(name) == name]
        kept = [name for name in storages if rng.random() < 0.7]
        schedule = random_copies(graph, keep(graph, kept), rng)
        try:
            simulation = simulate(graph, schedule, places=places)
        except IllegalScheduleError:
            continue
        if schedule.has_copies:
            n -= 1
            yield graph, schedule, as_large_as(places, simulation)


def larger_dag(seed: int) -> Graph:
    graph = random_dag(seed=seed, n_forward=seed % 8 + 2, n_later=seed % 7 + 1)
    return some_not_copyable(graph, seed=seed)


def as_large_as(places: Places, used: Simulation) -> Places:
    """The same links, and room for what the schedule takes."""
    host = replace(places.host, capacity_bytes=max(1, used.host_peak_bytes))
    disk = replace(places.disk, capacity_bytes=max(1, used.disk_peak_bytes))
    return Places(host, disk)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("first_seed", range(0, 20_000, 200))
def test_every_position_bounds_random_schedules(first_seed: int) -> None:
    for graph, schedule, places in schedules(30, first_seed=first_seed):
        simulation = simulate(graph, schedule, places=places)
        lost = simulation.time_s / graph.baseline_time_s - 1 if graph.baseline_time_s else math.inf
        folded = StorageGraph.of(graph, may_offload=True)
        for p in range(1, folded.n_nodes + 1):
            program = CopyMilp(
                folded, position=p, budget_bytes=simulation.peak_bytes, places=places
            )
            assert program.solve(as_milp=False).lost_share <= lost + 1e-9


# Of two blocks the first one's output waits for long and the second one's comes back at once.
CHAIN = make(
    [
        op("f1", "", "a", time_s=1.0),
        op("f2", "a", "b", time_s=3.0),
        op("f3", "b", "c", time_s=4.0),
        op("b3", "c b", "g3", time_s=4.0, phase="backward"),
        op("b2", "g3 a", "g2", time_s=3.0, phase="backward"),
    ],
    {"a": 4, "b": 4, "c": 4, "g3": 4, "g2": 4},
    outputs="g2",
)
"""While b3 runs, b, c and g3 are there, and a would be the fourth."""


def host(bytes_per_s: float, capacity_bytes: int = 100) -> Places:
    return Places(host=Place(capacity_bytes, Link(bytes_per_s, bytes_per_s)))


def lost_s(places: Places, position: int, graph: Graph = CHAIN) -> float:
    folded = StorageGraph.of(graph, may_offload=True)
    program = CopyMilp(folded, position=position, budget_bytes=12, places=places)
    return CHAIN.baseline_time_s * program.solve(as_milp=True).lost_share


def test_what_has_time_to_leave_and_to_come_back_costs_nothing() -> None:
    # a leaves during f2 and f3, which take 7 s; but it comes back between b3 and b2: 4 / rate.
    assert lost_s(host(100.0), 3) == pytest.approx(0.04, abs=1e-3)


def test_a_slow_link_is_no_better_than_to_recompute() -> None:
    assert lost_s(host(1.0), 3) == pytest.approx(1.0, abs=1e-3)
    assert lost_s(Places(), 3) == pytest.approx(1.0, abs=1e-3)


def test_what_the_host_cannot_hold_does_not_leave() -> None:
    assert lost_s(host(100.0, capacity_bytes=3), 3) == pytest.approx(1.0, abs=1e-3)


def test_an_output_does_not_leave() -> None:
    graph = replace(CHAIN, outputs=("a", "g2"))
    assert lost_s(host(100.0), 3, graph) == pytest.approx(1.0, abs=1e-3)


def test_without_places_the_bound_is_that_of_the_cut() -> None:
    for seed in range(40):
        graph = larger_dag(seed)
        if any(graph.views.values()):
            continue  # what a lock proves is left out here
        folded, free = StorageGraph.of(graph), StorageGraph.of(graph, may_offload=True)
        budget_bytes = int(free.least_bytes.max()) + seed % 5
        for p in range(1, folded.n_nodes):
            cut = solve_cuts(folded, positions=[p], budget_bytes=budget_bytes, as_milp=False)
            program = CopyMilp(free, position=p, budget_bytes=budget_bytes, places=Places())
            assert program.solve(as_milp=False).lost_share <= cut.lost_share + 1e-6
