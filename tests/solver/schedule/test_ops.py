"""Schedules: their file format, and that no choice of frees holds less than free_after_last_use."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from graphs.files import FormatError
from graphs.graph import Graph
from solver.schedule.ops import Compute, Free, Schedule, free_after_last_use, ops_from_json
from solver.schedule.recompute import keep_order, without_dead_computes
from solver.schedule.simulator import IllegalScheduleError, simulate
from tests.support.small_graphs import make, op, plan, random_step, uniform_chain, words


def text(schedule: Schedule) -> str:
    words = (o.node if isinstance(o, Compute) else f"-{o.tensor}" for o in schedule.ops)
    return " ".join(words)


def test_frees_by_hand() -> None:
    graph = uniform_chain(3)
    assert text(free_after_last_use(graph, words("f1 f2 f3 loss b3 b2 b1"))) == (
        "f1 f2 f3 loss -x3 b3 -x2 -g3 b2 -x1 -g2 b1 -g1"
    )
    again = free_after_last_use(graph, words("f1 f2 f3 loss f1 f2 b3 b2 f1 b1"))
    assert text(again) == ("f1 f2 -x1 f3 -x2 loss -x3 f1 f2 b3 -x2 -g3 b2 -x1 -g2 f1 -x1 b1 -g1")
    assert again.order == tuple(words("f1 f2 f3 loss f1 f2 b3 b2 f1 b1"))


def test_what_nothing_reads_is_freed_at_once_and_outputs_stay() -> None:
    graph = make(
        [op("f", "x", "a b"), op("g", "x", "c"), op("h", "x", "")],
        {"x": 1, "a": 1, "b": 1, "c": 1},
        outputs="b",
    )
    assert text(free_after_last_use(graph, words("f g h"))) == "f -a g -c h"
    # an output is dropped before it is recomputed, and then stays
    assert text(free_after_last_use(graph, words("f g h f"))) == "f -a -b g -c h f -a"


def test_views_are_freed_one_by_one() -> None:
    graph = make(
        [op("f", "x", "a"), op("v", "a", "view"), op("q", "view", "d", phase="backward")],
        {"x": 1, "a": 4, "view": 4, "d": 1},
        aliases={"view": "a"},
        outputs="d",
    )
    assert text(free_after_last_use(graph, words("f v q"))) == "f v -a q -view"
    again = free_after_last_use(graph, words("f v v q"))  # the view once more, on the same storage
    assert text(again) == "f v -view v -a q -view"
    assert simulate(graph, again).live_bytes == (5, 5, 5, 5, 5, 6, 2)


def test_a_view_node_that_does_not_say_what_it_views_needs_the_root() -> None:
    graph = make(
        [op("f", "x", "a"), op("v", "x", "view"), op("w", "view", "second")],
        {"x": 1, "a": 4, "view": 4, "second": 4},
        aliases={"view": "a", "second": "a"},
        outputs="second",
    )
    assert [graph.needs[node.name] for node in graph.nodes] == [("x",), ("x", "a"), ("view",)]
    assert text(free_after_last_use(graph, words("f v w"))) == "f v -a w -view"


def test_round_trip() -> None:
    graph = uniform_chain(3)
    schedule = plan(graph, "f1 f2 f3 loss -x3 b3 -x2 -g3 b2 -x1 -g2 b1 -g1")
    items = schedule.ops_to_json()
    assert items[:2] == [["compute", "f1"], ["compute", "f2"]]
    assert items[4] == ["free", "x3"]
    assert ops_from_json(items, source="s") == schedule.ops
    assert ops_from_json([], source="s") == ()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "compute",
        ["compute"],
        ["compute", "a", "b"],
        ["compute", 3],
        ["offload", "a"],
        [["compute"], "a"],
        {"compute": "a"},
    ],
)
def test_a_bad_entry_is_named(bad: object) -> None:
    with pytest.raises(FormatError, match=r"plan\.json: ops\[1\] is .*expected \[\"compute\""):
        ops_from_json([["compute", "a"], bad], source="plan.json")


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver.schedule.ops.MAX_ENTRIES", 3)
    with pytest.raises(FormatError, match="ops has 4 entries; at most 3"):
        ops_from_json([["compute", "a"]] * 4, source="s")


def orders(graph: Graph, rng: random.Random, n: int) -> Iterator[list[str]]:
    roots = sorted({graph.root(name) for name in graph.producer})
    for _ in range(n):
        order = keep_order(graph, rng.sample(roots, rng.randint(0, len(roots))))
        yield order
        yield without_dead_computes(graph, order)


def during(graph: Graph, schedule: Schedule) -> list[int]:
    """Bytes at each compute: where peaks stand."""
    simulation = simulate(graph, schedule)
    pairs = zip(schedule.ops, simulation.live_bytes, strict=True)
    return [live_bytes for o, live_bytes in pairs if isinstance(o, Compute)]


@pytest.mark.slow(sample=60)
@pytest.mark.parametrize("seed", range(150))
def test_later_frees_never_hold_less(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_step(seed)
    for order in orders(graph, rng, 3):
        schedule = free_after_last_use(graph, order)
        early = during(graph, schedule)
        for _ in range(10):
            ops = list(schedule.ops)
            for _ in range(rng.randint(1, 6)):
                i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
                if isinstance(ops[i], Free):
                    ops.insert(j, ops.pop(i))
            moved = Schedule(ops=tuple(ops), graph_id=graph.graph_id)
            try:
                late = during(graph, moved)
            except IllegalScheduleError:
                continue
            assert all(a <= b for a, b in zip(early, late, strict=True))


@pytest.mark.slow(sample=30)
@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_frees_holds_less(seed: int) -> None:
    """All sets of tensors that could be there before each compute, by exhaustion."""
    graph = random_step(seed, n_forward=4, n_later=2)
    for order in orders(graph, random.Random(seed), 2):
        early = during(graph, free_after_last_use(graph, order))
        assert early == least_possible(graph, order)


def least_possible(graph: Graph, order: list[str]) -> list[int]:
    """For each compute the least bytes over all legal choices of frees around it."""
    before: list[set[frozenset[str]]] = []
    states = {frozenset[str]()}
    for name in order:  # forwards: what can be reached
        before.append({sub for state in states for sub in subsets(state)})
        states = {s for s in (run(graph, state, name) for state in before[-1]) if s is not None}
    made = set(graph.outputs) & set(graph.producer)
    goals = {state for state in states if made <= state}
    least = []
    for name, reached in zip(reversed(order), reversed(before), strict=True):  # what leads on
        useful = {state for state in reached if run(graph, state, name) in goals}
        least.append(min(bytes_during(graph, state, name) for state in useful))
        goals = all_above(useful, graph)
    return least[::-1]


def subsets(state: frozenset[str]) -> Iterator[frozenset[str]]:
    for n in range(len(state) + 1):
        yield from map(frozenset, itertools.combinations(sorted(state), n))


def all_above(states: set[frozenset[str]], graph: Graph) -> set[frozenset[str]]:
    """Every state from which frees lead to one of these."""
    above = set(states)
    for name in graph.producer:
        above |= {state | {name} for state in above}
    return above


def run(graph: Graph, here: frozenset[str], name: str) -> frozenset[str] | None:
    """The state after the compute, or None where its inputs or outputs forbid it."""
    node = graph.node_by_name[name]
    outputs = set(node.outputs)
    missing = [n for n in graph.needs[node.name] if n in graph.producer and n not in here]
    if missing or (outputs and outputs <= here):
        return None
    for root in outputs:
        on_it = {n for n in here if graph.root(n) == root}
        if on_it - outputs or (on_it and root not in on_it):
            return None
    return here | outputs


def bytes_during(graph: Graph, here: frozenset[str], name: str) -> int:
    node = graph.node_by_name[name]
    size = {t.name: t.size_bytes for t in graph.tensors}
    held = {graph.root(n) for n in here} & set(graph.producer)
    new = [n for n in node.outputs if graph.root(n) == n]
    here_bytes = sum(size[n] for n in held) + graph.resident_bytes
    return here_bytes + sum(size[n] for n in new) + node.workspace_bytes
