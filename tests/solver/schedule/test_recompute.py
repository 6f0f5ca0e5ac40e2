"""From a decision to an order: exact recomputation, always legal, nothing dead left in."""

from __future__ import annotations

import random

import pytest

from graphs.graph import Graph
from solver.schedule.ops import free_after_last_use
from solver.schedule.recompute import (
    baseline,
    is_recomputable,
    keep,
    keep_order,
    missing_computes,
    without_dead_computes,
)
from solver.schedule.simulator import simulate
from tests.support.small_graphs import make, op, random_step, uniform_chain, words


def test_baseline_runs_each_node_once() -> None:
    graph = uniform_chain(4)
    schedule = baseline(graph)
    assert schedule.order == tuple(node.name for node in graph.nodes)
    # x_0 .. x_4 and the first gradient: the loss reads x_4 and makes g_4
    simulation = simulate(graph, schedule)
    assert (simulation.peak_bytes, simulation.n_recomputed, simulation.time_s) == (6, 0, 9.0)


def test_keeping_nothing_recomputes_each_forward_node_once() -> None:
    """What is recomputed is held to its last use, so b_3 and below find theirs."""
    graph = uniform_chain(4)
    order = keep_order(graph, ())
    assert order == words("f1 f2 f3 f4 f1 f2 f3 f4 loss b4 b3 b2 b1")
    assert simulate(graph, keep(graph, ())).n_recomputed == 4


def test_keeping_some() -> None:
    graph = uniform_chain(6)
    order = keep_order(graph, {"x3", "x6"})
    assert order == words("f1 f2 f3 f4 f5 f6 loss f4 f5 b6 b5 b4 f1 f2 b3 b2 b1")
    # at the loss: x_0, x_3, x_6 and g_6; at b_6: x_0, x_3, x_4, x_5 and g_6, g_5
    assert simulate(graph, keep(graph, {"x3", "x6"})).peak_bytes == 6


def test_a_name_that_no_tensor_has_is_refused() -> None:
    with pytest.raises(ValueError, match="kept names 'y3', which is not a tensor of the graph"):
        keep(uniform_chain(6), {"x3", "y3"})


def test_what_may_not_run_again_is_kept() -> None:
    nodes = [op("f", "x", "a"), op("drop", "a", "b", recomputable=False), op("g", "b", "c")]
    nodes.append(op("q", "a b c", "d", phase="backward"))
    graph = make(nodes, dict.fromkeys("xabcd", 1), outputs="d")
    assert keep_order(graph, ()) == words("f drop g f g q")


def test_views_follow_their_storage() -> None:
    graph = make(
        [
            op("f", "x", "a s"),
            op("v", "a", "view"),
            op("g", "view", "b"),
            op("q", "s", "d", phase="backward"),
            op("r", "view d", "e", phase="backward"),
        ],
        {"x": 1, "a": 4, "s": 2, "view": 4, "b": 1, "d": 1, "e": 1},
        aliases={"view": "a"},
        outputs="e",
    )
    # s is recomputed, with it a, so that the kept view is lost and taken again
    assert keep_order(graph, {"a"}) == words("f v g f q v r")
    simulate(graph, keep(graph, {"a"}))


def test_a_view_that_stays_forbids_another_run() -> None:
    graph = make(
        [
            op("f", "x", "a s"),
            op("g", "x", "b t"),
            op("u", "b", "view.b", recomputable=False),
            op("v", "a", "view.a", phase="backward"),
            op("q", "s t view.a view.b", "d", phase="backward"),
        ],
        {"x": 1, "a": 4, "s": 2, "b": 4, "t": 1, "view.a": 4, "view.b": 4, "d": 1},
        aliases={"view.a": "a", "view.b": "b"},
        outputs="d",
    )
    assert not is_recomputable(graph, graph.node_by_name["f"])
    assert not is_recomputable(graph, graph.node_by_name["g"])
    assert keep_order(graph, ()) == words("f g u v q")
    simulate(graph, keep(graph, ()))


def test_an_output_that_views_a_storage_made_again_is_taken_again() -> None:
    graph = make(
        [op("f", "x", "a s"), op("v", "a", "view"), op("q", "s", "d", phase="backward")],
        {"x": 1, "a": 4, "s": 2, "view": 4, "d": 1},
        aliases={"view": "a"},
        outputs="view d",
    )
    assert keep_order(graph, ()) == words("f v f q v")
    simulate(graph, keep(graph, ()))


def test_missing_computes_by_hand() -> None:
    graph = make(
        [
            op("f", "x", "a"),
            op("g", "a", "b c"),
            op("h", "b", "d"),
            op("q", "c d", "e", phase="backward"),
        ],
        dict.fromkeys("xabcde", 1),
        outputs="e",
    )
    available = {"x", "b"}
    assert missing_computes(graph, ("c", "d"), available) == ["f", "g", "h"]
    assert available == set("xabcd")
    assert missing_computes(graph, ("c", "d"), available) == []
    assert missing_computes(graph, ("d",), {"x", "b"}) == ["h"]


def test_a_long_chain_needs_no_deep_stack() -> None:
    graph = uniform_chain(5000)
    assert len(missing_computes(graph, ("x5000",), {"x0"})) == 5000


def test_dead_computes_by_hand() -> None:
    graph = uniform_chain(3)
    order = words("f1 f2 f3 f1 loss f2 f1 f2 b3 b2 f3 f1 b1")
    # b_3 reads x_2 of the third f2, b_2 x_1 of the third f1; nothing reads the other repeats
    assert without_dead_computes(graph, order) == words("f1 f2 f3 loss f1 f2 b3 b2 b1")


def test_first_runs_stay_although_nothing_reads_them() -> None:
    graph = make([op("f", "x", "a"), op("effect", "x", "")], {"x": 1, "a": 1})
    assert without_dead_computes(graph, ["f", "effect", "f"]) == ["f", "effect"]


@pytest.mark.slow(sample=100)
@pytest.mark.parametrize("seed", range(300))
def test_any_choice_is_legal_and_pruning_only_helps(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_step(seed, n_forward=rng.randint(1, 12), n_later=rng.randint(0, 8))
    roots = sorted({graph.root(name) for name in graph.producer})
    for _ in range(5):
        kept = rng.sample(roots, rng.randint(0, len(roots)))
        order = keep_order(graph, kept)
        simulation = simulate(graph, free_after_last_use(graph, order))
        pruned = without_dead_computes(graph, order)
        after = simulate(graph, free_after_last_use(graph, pruned))
        assert after.time_s <= simulation.time_s
        assert recomputes_nothing_dead(graph, pruned)


def recomputes_nothing_dead(graph: Graph, order: list[str]) -> bool:
    """Each run after the first makes something that is read, or an output, before it is remade."""
    for position, name in enumerate(order):
        if name not in order[:position]:
            continue
        wanted = set(graph.node_by_name[name].outputs)
        later = order[position + 1 :]
        until = later.index(name) if name in later else len(later)
        storages = {graph.root(n) for n in wanted}
        read = {graph.root(n) for o in later[:until] for n in graph.node_by_name[o].inputs}
        viewed = {graph.root(n) for o in later[:until] for n in graph.node_by_name[o].outputs}
        held = wanted & set(graph.outputs) if until == len(later) else set()
        if not held and not storages & (read | viewed):
            return False
    return True
