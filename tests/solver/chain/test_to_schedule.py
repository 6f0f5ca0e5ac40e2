"""Chain operations as a schedule of a graph."""

from __future__ import annotations

import random

import pytest

from graphs.graph import Graph
from solver.chain.blocks import Blocks, checkpoints, split_into_blocks
from solver.chain.problem import (
    Backward,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
)
from solver.chain.to_schedule import chain_to_schedule
from solver.schedule.ops import Schedule
from solver.schedule.recompute import baseline, keep
from solver.schedule.simulator import simulate
from tests.support import synthetic_graphs
from tests.support.small_graphs import random_step, uniform_chain, words

KINDS = {
    "k": ForwardKeepingInput,
    "n": ForwardKeepingOutput,
    "a": ForwardKeepingAll,
    "b": Backward,
}


def schedule_of(graph: Graph, blocks: Blocks, text: str) -> Schedule:
    """ "k1" keeps block 1's output and input, "n1" its output alone, "a1" all; "b1": backward."""
    ops = [KINDS[word[0]](int(word[1:])) for word in words(text)]
    return chain_to_schedule(graph, blocks, ops)


def test_operations_by_hand() -> None:
    graph = uniform_chain(4)
    blocks = split_into_blocks(graph)
    assert blocks.backward[3] == ("loss", "b4")

    def order(text: str) -> str:
        return " ".join(schedule_of(graph, blocks, text).order)

    assert order("a1 a2 a3 a4 b5 b4 b3 b2 b1") == "f1 f2 f3 f4 loss b4 b3 b2 b1"
    # all from x_0: revolve with one snapshot
    text = "k1 n2 n3 a4 b5 b4 k1 n2 a3 b3 k1 a2 b2 a1 b1"
    assert order(text) == "f1 f2 f3 f4 loss b4 f1 f2 b3 f1 b2 b1"
    # x_2 is held: f3 and f4 are not recomputed for b_4, nor f4 for b_3
    text = "k1 n2 k3 a4 b5 b4 a3 b3 k1 a2 b2 a1 b1"
    assert order(text) == "f1 f2 f3 f4 loss b4 b3 f1 b2 b1"
    # a segment recomputed at once and kept for both backward passes
    text = "k1 n2 n3 a4 b5 b4 a1 a2 a3 b3 b2 b1"
    assert order(text) == "f1 f2 f3 f4 loss b4 f1 f2 b3 b2 b1"


def test_what_a_run_again_makes_beside_its_output_is_dropped() -> None:
    """Blocks of two ops: running through one to its end keeps the end alone."""
    graph = uniform_chain(6)
    blocks = split_into_blocks(graph, max_blocks=3)
    assert [len(names) for names in blocks.forward] == [2, 2, 2]
    schedule = schedule_of(graph, blocks, "k1 n2 a3 b4 b3 k1 a2 b2 a1 b1")
    assert " ".join(schedule.order) == "f1 f2 f3 f4 f5 f6 loss b6 b5 f1 f2 f3 b4 b3 f1 b2 b1"


def persistent(rng: random.Random, first: int, last: int) -> list[str]:
    """A random persistent schedule of blocks first .. last, whose input is there."""
    if first == last:
        return [f"a{first}", f"b{first}"]
    if rng.random() < 0.4:
        return [f"a{first}", *persistent(rng, first + 1, last), f"b{first}"]
    middle = rng.randint(first + 1, last)
    through = [f"n{block}" for block in range(first + 1, middle)]
    return [
        f"k{first}",
        *through,
        *persistent(rng, middle, last),
        *persistent(rng, first, middle - 1),
    ]


def with_loss(text: list[str], n_blocks: int) -> str:
    """The caller's loss comes after the last block has run for the first time."""
    place = text.index(f"a{n_blocks}") + 1
    return " ".join([*text[:place], f"b{n_blocks + 1}", *text[place:]])


@pytest.mark.slow(sample=80)
@pytest.mark.parametrize("seed", range(200))
def test_any_persistent_schedule_is_legal_on_any_graph(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_step(seed, n_forward=rng.randint(1, 14), n_later=rng.randint(0, 9))
    blocks = split_into_blocks(graph)
    for _ in range(4):
        text = with_loss(persistent(rng, 1, blocks.n_blocks), blocks.n_blocks)
        assert simulate(graph, schedule_of(graph, blocks, text)).time_s >= graph.baseline_time_s


@pytest.mark.parametrize(
    "graph",
    [
        synthetic_graphs.residual(n_blocks=8),
        synthetic_graphs.u_shape(depth=4),
        synthetic_graphs.dense(n_layers=8),
        synthetic_graphs.recurrent(n_steps=12),
    ],
)
def test_keeping_all_or_every_input_on_nets(graph: Graph) -> None:
    blocks = split_into_blocks(graph)
    n = blocks.n_blocks
    down = " ".join(f"b{block}" for block in range(n, 0, -1))
    everything = " ".join(f"a{block}" for block in range(1, n + 1))
    kept = schedule_of(graph, blocks, f"{everything} b{n + 1} {down}")
    assert simulate(graph, kept) == simulate(graph, baseline(graph))
    inputs = " ".join(f"k{block}" for block in range(1, n))
    again = " ".join(f"a{block} b{block}" for block in range(n - 1, 0, -1))
    checkpointed = schedule_of(graph, blocks, f"{inputs} a{n} b{n + 1} b{n} {again}")
    reference = simulate(graph, keep(graph, checkpoints(graph, blocks, n_whole=1)))
    assert simulate(graph, checkpointed).time_s == pytest.approx(reference.time_s)
