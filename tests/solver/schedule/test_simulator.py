"""The simulator: peaks and times worked out by hand, and no illegal schedule passes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graphs.graph import Graph
from solver.methods.registry import METHODS
from solver.schedule.ops import Schedule
from solver.schedule.recompute import baseline, keep
from solver.schedule.simulator import IllegalScheduleError, simulate
from tests.support.mutated_schedules import mutant
from tests.support.plain_simulator import (
    BrokenRuleError,
    assert_simulators_agree,
    simulate_plainly,
)
from tests.support.small_graphs import make, op, plan, random_step, uniform_chain


def curve(graph: Graph, text: str) -> tuple[int, ...]:
    return simulate(graph, plan(graph, text)).live_bytes


def refused(graph: Graph, text: str) -> IllegalScheduleError:
    with pytest.raises(IllegalScheduleError) as caught:
        simulate(graph, plan(graph, text))
    return caught.value


@pytest.fixture
def step() -> Graph:
    """x, w resident (10 + 3 bytes); f: a (5), g: b (7), loss: c (1); q: d (2) from a, b."""
    return make(
        [
            op("f", "x w", "a", time_s=2.0),
            op("g", "a", "b", time_s=4.0, workspace_bytes=20),
            op("loss", "b", "c", time_s=8.0),
            op("q", "a b", "d", time_s=16.0, phase="backward"),
        ],
        {"x": 10, "w": 3, "a": 5, "b": 7, "c": 1, "d": 2},
        outputs="c d",
    )


def test_baseline_by_hand(step: Graph) -> None:
    simulation = simulate(step, plan(step, "f g loss q -a -b"))
    # f: 13 + 5; g: 18 + 7 + 20 workspace; loss: 25 + 1; q: 26 + 2; frees
    assert simulation.live_bytes == (18, 45, 26, 28, 23, 16)
    assert (
        simulation.peak_bytes,
        simulation.peak_op,
        simulation.time_s,
        simulation.n_recomputed,
    ) == (45, 1, 30.0, 0)


def test_recomputation_by_hand(step: Graph) -> None:
    simulation = simulate(step, plan(step, "f g -a loss -b f g q -a -b"))
    assert simulation.live_bytes == (18, 45, 20, 21, 14, 19, 46, 28, 23, 16)
    assert (simulation.time_s, simulation.n_recomputed, simulation.peak_op) == (36.0, 2, 6)


def test_a_graph_without_nodes_holds_what_is_resident() -> None:
    graph = make([], {"x": 7})
    simulation = simulate(graph, plan(graph, ""))
    assert (simulation.peak_bytes, simulation.peak_op, simulation.live_bytes) == (7, None, ())


def test_an_output_may_be_dropped_and_made_again(step: Graph) -> None:
    assert curve(step, "f g loss -c loss q -a -b")[3:5] == (25, 26)
    assert refused(step, "f g loss loss q").position == 3
    assert refused(step, "f g loss -c q").position is None
    assert refused(step, "f g loss q -c").position is None


def test_outputs_that_are_resident_need_nothing() -> None:
    graph = make([op("f", "x", "a")], {"x": 4, "a": 2}, outputs="x")
    assert curve(graph, "f -a") == (6, 4)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("g f loss q", 0, "before 'f'"),
        ("f loss g q", 1, "before 'g'"),
        ("f g q loss", 2, "before forward node 'loss'"),
        ("f g loss", None, "'q' has never run"),
        ("f g loss q q", 4, "second time"),
        ("f f g loss q", 1, "all its outputs"),
        ("f -a g loss q", 2, "reads 'a'"),
        ("f g -b loss q", 3, "reads 'b'"),
        ("f g loss -a q", 4, "reads 'a'"),
        ("f -b g loss q", 1, "not on the device"),
        ("f -a -a g loss q", 2, "not on the device"),
        ("f -x g loss q", 1, "resident"),
        ("f -nobody g loss q", 1, "not a tensor"),
        ("nobody", 0, "not a node"),
        ("f g loss q -d", 4, "output"),
    ],
)
def test_each_rule_is_enforced(step: Graph, text: str, position: int | None, reason: str) -> None:
    if reason == "output":
        position, reason = None, "output 'd'"
    error = refused(step, text)
    assert error.position == position
    assert reason in error.reason


def test_something_else_than_an_op_is_refused(step: Graph) -> None:
    schedule = Schedule(ops=("f",), graph_id=step.graph_id)
    with pytest.raises(IllegalScheduleError, match="'f' is not an op of a schedule"):
        simulate(step, schedule)


def test_a_schedule_for_another_graph_is_refused(step: Graph) -> None:
    other = uniform_chain(2)
    with pytest.raises(IllegalScheduleError, match="another graph"):
        simulate(step, baseline(other))


def test_effects_and_what_is_not_recomputable_run_once() -> None:
    graph = make(
        [op("f", "x", "a", recomputable=False), op("effect", "a", ""), op("g", "a", "b")],
        {"x": 1, "a": 2, "b": 3},
        outputs="b",
    )
    assert curve(graph, "f effect g -a") == (3, 3, 6, 4)
    assert "not recomputable" in refused(graph, "f -a f effect g").reason
    assert "all its outputs" in refused(graph, "f effect effect g").reason


@pytest.fixture
def twins() -> Graph:
    """f makes a (5) and b (7) from x (1)."""
    return make(
        [
            op("f", "x", "a b", workspace_bytes=2),
            op("g", "a", "c"),
            op("q", "a b", "d", phase="backward"),
        ],
        {"x": 1, "a": 5, "b": 7, "c": 3, "d": 0},
        outputs="c d",
    )


def test_outputs_that_are_still_there_count_twice(twins: Graph) -> None:
    # At the second f, a is live: 1 + 5 + 3, both outputs again (12), workspace 2; then 1 + 3 + 12.
    assert curve(twins, "f -b g f q -a -b") == (15, 6, 9, 23, 16, 11, 4)


def test_all_outputs_there_is_illegal_one_missing_is_not(twins: Graph) -> None:
    assert refused(twins, "f g f q").position == 2
    assert curve(twins, "f g -a f q")[3] == 1 + 7 + 3 + 12 + 2


@pytest.fixture
def views() -> Graph:
    """f makes a (8) and s (1); v makes a view of a."""
    return make(
        [
            op("f", "x", "a s"),
            op("v", "a", "view", time_s=0.0),
            op("q", "view s", "d", phase="backward"),
        ],
        {"x": 2, "a": 8, "s": 1, "view": 8, "d": 3},
        aliases={"view": "a"},
        outputs="d",
    )


def test_a_view_adds_nothing_and_holds_the_storage(views: Graph) -> None:
    assert curve(views, "f v -a q -view -s") == (11, 11, 11, 14, 6, 5)
    assert curve(views, "f v -view v -a q -view -s") == (11,) * 5 + (14, 6, 5)


def test_a_storage_is_not_made_again_under_a_view(views: Graph) -> None:
    assert "old storage" in refused(views, "f v -a f q").reason
    assert "old storage" in refused(views, "f v -s f q").reason  # the root is still there as well
    assert curve(views, "f v -s -view f v q -a -view -s")[4] == 2 + 8 + 9


def test_a_view_of_nothing_is_refused() -> None:
    graph = make(
        [op("f", "x", "a"), op("v", "x", "view"), op("q", "view", "d", phase="backward")],
        {"x": 1, "a": 4, "view": 4, "d": 1},
        aliases={"view": "a"},
        outputs="d",
    )
    assert curve(graph, "f v -a q -view") == (5, 5, 5, 6, 2)
    assert "whose storage is not" in refused(graph, "f -a v q").reason


def test_a_view_made_by_the_same_node_goes_with_its_root() -> None:
    graph = make(
        [op("f", "x", "a view s"), op("q", "view s", "d", phase="backward")],
        {"x": 0, "a": 4, "view": 4, "s": 1, "d": 0},
        aliases={"view": "a"},
        outputs="d",
    )
    assert curve(graph, "f -s f q -a -view -s") == (5, 4, 9, 5, 5, 1, 0)
    assert "old storage" in refused(graph, "f -a -s f q").reason


def test_a_view_of_something_resident_is_free() -> None:
    graph = make(
        [op("v", "x", "view"), op("f", "view", "a")],
        {"x": 6, "view": 6, "a": 1},
        aliases={"view": "x"},
        outputs="a",
    )
    assert graph.resident_bytes == 6
    assert curve(graph, "v -view v f -view") == (6, 6, 6, 7, 7)


def test_simulating_changes_nothing(step: Graph) -> None:
    before, schedule = step.to_json(), plan(step, "f g loss q -a -b")
    assert simulate(step, schedule) == simulate(step, schedule)
    assert step.to_json() == before


def legal_schedules(graph: Graph, rng: random.Random) -> list[Schedule]:
    roots = sorted({graph.root(name) for name in graph.producer})
    schedules = [baseline(graph), keep(graph, ())]
    schedules += [keep(graph, rng.sample(roots, rng.randint(0, len(roots)))) for _ in range(3)]
    peak_bytes = simulate(graph, schedules[0]).peak_bytes
    for name, method in METHODS.items():
        if name in ("none", "every_block", "sqrt", "revolve", "dp"):
            found = method(graph, budget_bytes=peak_bytes, time_limit_s=600, seed=0).schedule
            schedules += [found] if found else []
    return schedules


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("block", range(10))
def test_both_simulators_agree_on_mutated_schedules(block: int) -> None:
    n_illegal = n_legal = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        graph = random_step(seed, n_forward=rng.randint(2, 9), n_later=rng.randint(1, 6))
        for schedule in legal_schedules(graph, rng):
            assert assert_simulators_agree(graph, schedule)
            for _ in range(6):
                ops = mutant(graph, schedule.ops, rng)
                if rng.random() < 0.3:
                    ops = mutant(graph, ops, rng)
                legal = assert_simulators_agree(graph, Schedule(ops, graph.graph_id))
                n_legal, n_illegal = n_legal + legal, n_illegal + (not legal)
    assert n_illegal > 300
    assert n_legal > 30  # so that both sides of the line are met


@pytest.fixture
def in_place() -> Graph:
    """a (5) is saved; g (7) is overwritten by h, and h by k."""
    nodes = [
        op("f", "x", "a"),
        op("b", "a", "g", phase="backward"),
        op("c", "g a", "h", phase="backward"),
        op("d", "h", "k", phase="backward", workspace_bytes=2),
    ]
    nodes[2:] = [replace(nodes[2], overwrites="g"), replace(nodes[3], overwrites="h")]
    sizes = {"x": 10, "a": 5, "g": 7, "h": 7, "k": 7}
    return make(nodes, sizes, aliases={"h": "g", "k": "g"}, outputs="k")


def test_an_overwriting_node_allocates_nothing(in_place: Graph) -> None:
    text = "f b c -g -a d -h"
    assert curve(in_place, text) == (15, 22, 22, 22, 17, 19, 17)
    assert assert_simulators_agree(in_place, plan(in_place, text))
    assert baseline(in_place) == plan(in_place, "f b c -g -a d -h")


@pytest.mark.parametrize("text", ["f b -g c -a d", "f b c -h -g -a d", "f b b c -g -a d"])
def test_an_overwrite_frees_nothing_early_and_runs_once(in_place: Graph, text: str) -> None:
    assert refused(in_place, text).position is not None
    assert not assert_simulators_agree(in_place, plan(in_place, text))


def test_the_plain_simulator_too_refuses_to_read_what_was_overwritten(
    in_place: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "graphs.graph.step_graph.validate", lambda graph: None
    )  # it refuses it first
    nodes = tuple(replace(n, inputs=("h", "g")) if n.name == "d" else n for n in in_place.nodes)
    mutant = replace(in_place, nodes=nodes)
    with pytest.raises(BrokenRuleError, match="7: an input was overwritten"):
        simulate_plainly(mutant, baseline(mutant))
    mutant = replace(in_place, outputs=("k", "h"))
    with pytest.raises(BrokenRuleError, match="7: an output was overwritten"):
        simulate_plainly(mutant, baseline(mutant))


def test_a_list_of_ops_is_no_schedule(step: Graph) -> None:
    with pytest.raises(TypeError, match=r"an object of type list; .*Schedule\(ops, graph_id="):
        simulate(step, list(baseline(step).ops))  # type: ignore[arg-type]
