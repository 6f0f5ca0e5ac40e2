"""A graph's blocks as a chain of numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from graphs.synthetic import nets
from solver.chain.blocks import Blocks, split_into_blocks
from solver.chain.from_graph import LEAST_ROOM, constant_bytes, room_bytes, to_chain
from tests.support.small_graphs import make, op, random_step, uniform_chain


def test_a_uniform_chain_in_numbers() -> None:
    graph = uniform_chain(4, unit_bytes=10)
    chain = to_chain(graph, split_into_blocks(graph))
    assert chain.forward_s == (1.0,) * 4
    assert chain.backward_s == (1.0, 1.0, 1.0, 2.0, 0.0)  # the loss is of the last block
    assert chain.input_bytes == (0, 10, 10, 10, 0)
    assert chain.saved_bytes == (0, 10, 10, 10, 10)
    # x_4 is no block's input: the last block makes it as workspace unless it is saved
    assert chain.forward_workspace_bytes == (0, 0, 0, 10)
    assert chain.backward_workspace_bytes == (0, 0, 0, 0, 0)
    assert constant_bytes(graph, split_into_blocks(graph)) == 10


def test_workspace_gradients_and_companions_in_numbers() -> None:
    graph = make(
        [
            op("f", "x w", "a", workspace_bytes=50, time_s=3.0),
            op("h", "a", "b"),
            op("g", "b x", "y", time_s=2.0),
            op("loss", "y", "gy loss", phase="outside", time_s=7.0),
            op("g.b", "gy b", "gb", phase="backward"),
            op("h.b", "gb a", "ga", phase="backward", workspace_bytes=30),
            op("f.b", "ga x", "gw", phase="backward"),
            op("adam", "gw w", "", phase="optimizer", workspace_bytes=99),
        ],
        {"x": 5, "w": 8, "a": 4, "b": 6, "y": 2, "gy": 2, "loss": 1} | {"gb": 6, "ga": 4, "gw": 8},
        outputs="loss",
    )
    blocks = Blocks(
        forward=(("f", "h"), ("g",)),
        backward=(("h.b", "f.b"), ("g.b",), ("loss",)),
        after=("adam",),
        crossing=((), ("b",), ("y",)),
        companions=frozenset(),
    )
    chain = to_chain(graph, blocks)
    assert (chain.forward_s, chain.backward_s) == ((4.0, 2.0), (2.0, 1.0, 7.0))
    assert chain.input_bytes == (0, 6, 2)
    assert chain.saved_bytes == (0, 4 + 6, 2)  # y is read by the caller's loss alone
    # block 1: a and 50 beside nothing, or a and b where only b stays: 54 - 6
    assert chain.forward_workspace_bytes == (48, 0)
    # block 1, h.b: gb, ga, a, loss and 30 = 45, of which a, b, gb are reckoned with: 45 - 16.
    # block 2, g.b: gy, gb, b, loss = 15, less b, gb, y, gy = 16. The loss: y, gy, loss = 5 - 4.
    assert chain.backward_workspace_bytes == (29, 0, 1)
    assert constant_bytes(graph, blocks) == 13


@pytest.mark.slow(sample=20)
@pytest.mark.parametrize("seed", range(40))
def test_numbers_add_up(seed: int) -> None:
    graph = random_step(seed, n_forward=seed % 15 + 1, n_later=seed % 9)
    blocks = split_into_blocks(graph)
    chain = to_chain(graph, blocks)
    counted = [node for node in graph.nodes if node.phase != "optimizer"]
    total_s = sum(chain.forward_s) + sum(chain.backward_s)
    assert total_s == pytest.approx(sum(node.time_s for node in counted))
    n = blocks.n_blocks
    assert len(chain.forward_s) == len(chain.forward_workspace_bytes) == n
    assert {len(chain.backward_s), len(chain.input_bytes), len(chain.saved_bytes)} == {n + 1}
    assert len(chain.backward_workspace_bytes) == n + 1
    pairs = zip(chain.saved_bytes, chain.input_bytes, strict=True)
    assert all(saved >= handed_on for saved, handed_on in pairs)


def test_gradients_of_parameters_take_the_room_of_earlier_blocks() -> None:
    graph = nets.residual(n_blocks=20)
    blocks = split_into_blocks(graph)
    room = room_bytes(graph, blocks, budget_bytes=graph.resident_bytes + 20 * 2**20)
    each = [room[f"{i}.conv1"] for i in range(1, 20)]
    assert {later - earlier for earlier, later in pairwise(each)} == {2 * 65536}
    none_left = room_bytes(graph, blocks, budget_bytes=graph.resident_bytes + 5 * 2**20)
    assert min(none_left.values()) >= max(1, LEAST_ROOM * max(none_left.values()))
