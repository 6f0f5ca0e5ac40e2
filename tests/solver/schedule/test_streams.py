"""Copies to host and disk: bytes and times worked out by hand, each rule, and both simulators."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graphs.graph import Graph
from solver.schedule.host_and_disk import Link, Place, Places
from solver.schedule.memory import live_bytes_by, memory_at
from solver.schedule.ops import (
    Delete,
    Drop,
    Fetch,
    Load,
    Schedule,
    Spill,
    Store,
    ops_from_json,
)
from solver.schedule.recompute import baseline, keep
from solver.schedule.simulator import (
    IllegalScheduleError,
    Simulation,
    simulate,
    timeline,
)
from tests.support.aliasing import aliasing_dag
from tests.support.mutated_schedules import mutant
from tests.support.overwriting import overwriting_dag
from tests.support.plain_simulator import BrokenRuleError, assert_simulators_agree, simulate_plainly
from tests.support.schedules_with_copies import random_copies, random_places
from tests.support.small_graphs import make, op, plan, random_step

PLACES = Places(
    host=Place(100, Link(out_bytes_per_s=2.0, in_bytes_per_s=4.0, latency_s=1.0)),
    disk=Place(100, Link(out_bytes_per_s=1.0, in_bytes_per_s=8.0)),
)


@pytest.fixture
def step() -> Graph:
    """x resident (10); f, g, h, each 4 s: a (8), b (4), c (4); q: d (0) from a and c, 1 s."""
    return make(
        [
            op("f", "x", "a", time_s=4.0),
            op("g", "a", "b", time_s=4.0),
            op("h", "b", "c", time_s=4.0),
            op("q", "a c", "d", time_s=1.0, phase="backward"),
        ],
        {"x": 10, "a": 8, "b": 4, "c": 4, "d": 0},
        outputs="d",
    )


def run(graph: Graph, text: str) -> Simulation:
    """Both agree."""
    schedule = plan(graph, text)
    assert assert_simulators_agree(graph, schedule, PLACES)
    return simulate(graph, schedule, places=PLACES)


def refused(graph: Graph, text: str, places: Places | None = PLACES) -> IllegalScheduleError:
    schedule = plan(graph, text)
    with pytest.raises(BrokenRuleError):
        simulate_plainly(graph, schedule, places)
    with pytest.raises(IllegalScheduleError) as caught:
        simulate(graph, schedule, places=places)
    return caught.value


def starts(graph: Graph, text: str) -> dict[str, tuple[float, float]]:
    """By op, written out: when it runs."""
    schedule = plan(graph, text)
    return {
        text.split()[event.position]: (event.start_s, event.end_s)
        for event in timeline(graph, schedule, places=PLACES)
    }


def test_a_copy_that_hides_costs_nothing(step: Graph) -> None:
    # stored from 4 to 9 while g and h run; fetched from 9 (the free waits: h starts at 9) to 12
    simulation = run(step, "f store:a g -a h fetch:a -b q")
    assert simulation.live_bytes == (18, 18, 22, 14, 18, 26, 22, 22)
    assert (simulation.time_s, simulation.stall_s) == (17.0, 4.0)
    assert simulation.host_peak_bytes == 8
    assert simulation.busy_s == {"store": 5.0, "fetch": 3.0}
    hidden = run(step, "f store:a g h -b -a fetch:a q")
    assert (hidden.time_s, hidden.stall_s) == (16.0, 3.0)
    early = run(step, "f store:a g h -a fetch:a q")
    assert early.stall_s == 3.0  # the fetch starts when h has ended
    assert starts(step, "f store:a g h -a fetch:a q") == {
        "f": (0.0, 4.0),
        "store:a": (4.0, 9.0),
        "g": (4.0, 8.0),
        "h": (8.0, 12.0),
        "fetch:a": (12.0, 15.0),
        "q": (15.0, 16.0),
    }
    beside = make(
        [*step.nodes[:3], op("p", "c", "e", time_s=4.0, phase="backward"), step.nodes[3]],
        {**sizes(step), "e": 0},
        outputs="d",
    )
    assert run(beside, "f store:a g h -a fetch:a p q").stall_s == 0.0


def sizes(graph: Graph) -> dict[str, int]:
    return {tensor.name: tensor.size_bytes for tensor in graph.tensors}


def test_a_copy_after_the_last_compute_ends_the_step(step: Graph) -> None:
    simulation = run(step, "f g h q store:a")
    assert (simulation.time_s, simulation.stall_s) == (18.0, 5.0)


def test_each_direction_is_a_stream_of_its_own(step: Graph) -> None:
    text = "f store:a g h store:b fetch:a q"
    with pytest.raises(IllegalScheduleError, match="on the device already"):
        simulate(step, plan(step, text), places=PLACES)
    # b waits for the stream until 9; the fetch of a starts beside it
    found = starts(step, "f store:a g store:b -a fetch:a h q")
    assert (found["store:a"], found["store:b"]) == ((4.0, 9.0), (9.0, 12.0))
    assert found["fetch:a"] == (9.0, 12.0)


def test_the_disk_is_one_hop_further(step: Graph) -> None:
    text = "f store:a spill:a drop:a g -a load:a h fetch:a delete:a q"
    simulation = run(step, text)
    found = starts(step, text)
    assert found["spill:a"] == (9.0, 17.0)
    assert found["load:a"] == (17.0, 18.0)  # its source is whole, the host's bytes free, at 17
    assert found["fetch:a"] == (18.0, 21.0)
    assert simulation.time_s == 22.0
    assert (simulation.host_peak_bytes, simulation.disk_peak_bytes) == (8, 8)


def test_a_drop_is_waited_for_by_later_copies_to_the_host(step: Graph) -> None:
    text = "f store:a spill:a drop:a g store:b h q"
    assert starts(step, text)["store:b"] == (17.0, 20.0)
    assert run(step, text).host_peak_bytes == 8
    text = "f store:a spill:a g store:b drop:a h q"
    assert starts(step, text)["store:b"] == (9.0, 12.0)
    assert run(step, text).host_peak_bytes == 12


def test_a_delete_is_waited_for_by_later_copies_to_the_disk(step: Graph) -> None:
    text = "f store:a g store:b spill:a drop:a load:a delete:a h spill:b q"
    run(step, text)
    found = starts(step, text)
    assert found["load:a"] == (17.0, 18.0)
    assert found["spill:b"] == (18.0, 22.0)


def test_recomputing_what_is_still_being_copied_waits(step: Graph) -> None:
    twins = make(
        [
            op("f", "x", "a e", time_s=4.0),
            op("g", "a", "b", time_s=1.0),
            op("q", "a b e", "d", time_s=1.0, phase="backward"),
        ],
        {"x": 1, "a": 20, "e": 1, "b": 1, "d": 0},
        outputs="d",
    )
    # f replaces a, which is on its way out until 15
    text = "f -e g store:a f q"
    assert starts(twins, text)["q"] == (16.0, 17.0)
    assert run(twins, text).live_bytes[4] == 1 + 20 + 1 + 21


def test_recomputing_leaves_the_copy_as_it_is(step: Graph) -> None:
    simulation = run(step, "f store:a g -a h f -a fetch:a q")
    assert simulation.n_recomputed == 1


@pytest.fixture
def views() -> Graph:
    """f makes a (8); v and w make views of it; q reads both."""
    return make(
        [
            op("f", "x", "a"),
            op("v", "a", "view", time_s=0.0),
            op("g", "view", "b"),
            op("w", "a", "late", time_s=0.0),
            op("q", "view late b", "d", phase="backward"),
        ],
        {"x": 2, "a": 8, "view": 8, "b": 1, "late": 8, "d": 0},
        aliases={"view": "a", "late": "a"},
        outputs="d",
    )


def test_a_fetch_brings_every_view_made_so_far(views: Graph) -> None:
    simulation = run(views, "f store:a v g -a -view fetch:a w -a q -view")
    assert simulation.live_bytes == (10, 10, 10, 11, 11, 3, 11, 11, 11, 11, 11)
    assert refused(views, "f store:a v g -a -view fetch:a v w q").position == 7
    assert refused(views, "f store:a v g -a -view fetch:a -late w q").position == 7
    assert "on the device already" in refused(views, "f store:a v g w -a -view fetch:a q").reason
    # while one view is there the storage is
    assert "on the device already" in refused(views, "f store:a v g -a fetch:a w q").reason


@pytest.fixture
def in_place() -> Graph:
    """a (5) is saved; g (7) is overwritten by h."""
    nodes = [
        op("f", "x", "a"),
        op("b", "a", "g", phase="backward"),
        op("c", "g a", "h", phase="backward"),
        op("d", "h", "k", phase="backward"),
    ]
    nodes[2] = replace(nodes[2], overwrites="g")
    sizes = {"x": 10, "a": 5, "g": 7, "h": 7, "k": 1}
    return make(nodes, sizes, aliases={"h": "g"}, outputs="k")


def test_no_copy_outlives_an_overwriting(in_place: Graph) -> None:
    error = refused(in_place, "f b store:g c d")
    assert (error.position, "'g', of which the host has a copy" in error.reason) == (3, True)
    assert "the disk has" in refused(in_place, "f b store:g spill:g drop:g c d").reason
    run(in_place, "f b store:g drop:g c d")


def test_what_was_overwritten_does_not_come_back(in_place: Graph) -> None:
    simulation = run(in_place, "f b store:g -g fetch:g drop:g c store:g -g -h -a fetch:g d -h")
    assert simulation.live_bytes[-1] == 11
    text = "f b c store:g -g -h fetch:g -g d"
    assert "free names 'g'" in refused(in_place, text).reason


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("f fetch:a g h q", 1, "fetch names 'a', which is not on the host"),
        ("f store:b g h q", 1, "store names 'b', which is not on the device"),
        ("f -a store:a g h q", 2, "which is not on the device"),
        ("f store:a store:a g h q", 2, "which is on the host already"),
        ("f store:a fetch:a g h q", 2, "which is on the device already"),
        ("f drop:a g h q", 1, "drop names 'a', which is not on the host"),
        ("f store:a drop:a drop:a g h q", 3, "which is not on the host"),
        ("f spill:a g h q", 1, "which is not on the host"),
        ("f load:a g h q", 1, "which is not on the disk"),
        ("f store:a spill:a load:a g h q", 3, "which is on the host already"),
        ("f store:a spill:a spill:a g h q", 3, "which is on the disk already"),
        ("f delete:a g h q", 1, "delete names 'a', which is not on the disk"),
        ("store:x f g h q", 0, "which is resident"),
        ("f store:nobody g h q", 1, "which is not a tensor"),
        ("f store:a -a g h q", 3, "reads 'a', which is not on the device"),
        ("f g h q store:d drop:d", 4, "store names 'd', which leaves the step"),
    ],
)
def test_each_rule_is_enforced(step: Graph, text: str, position: int | None, reason: str) -> None:
    error = refused(step, text)
    assert error.position == position
    assert reason in error.reason


def test_an_alias_is_not_copied_by_itself(views: Graph) -> None:
    assert "name its storage, 'a'" in refused(views, "f v store:view g w q").reason


def test_what_a_view_among_the_outputs_lies_on_is_not_copied(views: Graph) -> None:
    out = replace(views, outputs=("view",))
    assert "which leaves the step" in refused(out, "f v store:a g w q").reason


def test_what_is_not_copyable_is_not_copied(step: Graph) -> None:
    tensors = tuple(replace(t, copyable=t.name != "a") for t in step.tensors)
    fixed = replace(step, tensors=tensors)
    assert "store names 'a', which cannot be copied" in refused(fixed, "f store:a g h q").reason


def test_copies_need_places(step: Graph) -> None:
    error = refused(step, "f store:a g h q", None)
    assert "no host is given" in error.reason
    error = refused(step, "f store:a spill:a g h q", Places(host=PLACES.host))
    assert (error.position, "no disk is given" in error.reason) == (2, True)
    assert simulate(step, baseline(step), places=PLACES) == simulate(step, baseline(step))


def test_the_bytes_of_a_schedule_with_copies_are_explained(step: Graph) -> None:
    schedule = plan(step, "f store:a g -a h fetch:a -b q")
    live_bytes = simulate(step, schedule, places=PLACES).live_bytes
    for position in range(len(schedule.ops)):
        assert sum(memory_at(step, schedule, position).values()) == live_bytes[position]
    by_layer = live_bytes_by(step, schedule, lambda stay: stay.layer)
    assert by_layer == {"kept": (8, 12, 8, 12), "gradients": (0, 0, 0, 0)}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_links_have_rates(rate: float) -> None:
    with pytest.raises(ValueError, match=r"out_bytes_per_s of a link is .*must be above 0"):
        Link(rate, 1.0)
    with pytest.raises(ValueError, match="in_bytes_per_s of a link is"):
        Link(1.0, rate)


def test_places_are_checked() -> None:
    link = Link(2.0, 4.0, 0.5)
    assert (link.out_s(8), link.in_s(8)) == (4.5, 2.5)
    with pytest.raises(ValueError, match="latency_s of a link is -1"):
        Link(1.0, 1.0, -1.0)
    with pytest.raises(ValueError, match="capacity_bytes of a place is 0"):
        Place(0, link)
    with pytest.raises(ValueError, match="a disk and no host"):
        Places(disk=Place(1, link))


def test_copies_in_the_file(step: Graph) -> None:
    text = "f store:a spill:a drop:a g -a load:a delete:a h fetch:a q"
    schedule = plan(step, text)
    items = schedule.ops_to_json()
    assert items[1:4] == [["store", "a"], ["spill", "a"], ["drop", "a"]]
    assert ops_from_json(items, source="s") == schedule.ops
    assert schedule.has_copies
    assert not baseline(step).has_copies


def graphs(seed: int) -> tuple[Graph, ...]:
    return random_step(seed), overwriting_dag(seed), aliasing_dag(seed)


def schedules(graph: Graph, rng: random.Random) -> list[Schedule]:
    roots = sorted({graph.root(name) for name in graph.producer})
    return [baseline(graph), keep(graph, rng.sample(roots, rng.randint(0, len(roots))))]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("block", range(20))
def test_both_simulators_agree_on_random_copies(block: int) -> None:
    n_legal = n_stalled = 0
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(f"copies {seed}")
        places = random_places(rng)
        for graph in graphs(seed):
            for schedule in schedules(graph, rng):
                copied = random_copies(graph, schedule, rng)
                if assert_simulators_agree(graph, copied, places) and copied.has_copies:
                    n_legal += 1
                    n_stalled += simulate(graph, copied, places=places).stall_s > 0
    assert n_legal > 200
    assert n_stalled > 100


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("block", range(50))
def test_both_simulators_agree_on_mutated_copies(block: int) -> None:
    """100,000 in all."""
    n_illegal = n_legal = 0
    kinds = (Store, Fetch, Drop, Spill, Load, Delete)
    seed = 1000 * block
    while n_illegal + n_legal < 2000:
        seed += 1
        rng = random.Random(f"mutated copies {seed}")
        places = random_places(rng)
        graph = graphs(seed)[seed % 3]
        schedule = random_copies(graph, schedules(graph, rng)[seed % 2], rng)
        if not schedule.has_copies or not assert_simulators_agree(graph, schedule, places):
            continue
        for _ in range(20):
            ops = schedule.ops
            for _ in range(rng.choice((1, 1, 2))):
                extra = [rng.choice(kinds)(rng.choice(graph.tensors).name) for _ in range(2)]
                ops = mutant(graph, ops, rng, extra=extra)
            legal = assert_simulators_agree(graph, Schedule(ops, graph.graph_id), places)
            n_legal, n_illegal = n_legal + legal, n_illegal + (not legal)
    assert n_illegal > 800
    assert n_legal > 100
