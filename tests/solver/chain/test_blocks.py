"""Cutting a graph into a chain of blocks: where, what crosses, and whose backward is whose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from graphs.graph import Graph
from graphs.synthetic.tape import Tape
from solver.chain.blocks import Blocks, Storage, checkpoints, forward_storages, split_into_blocks
from tests.support import synthetic_graphs
from tests.support.paths import DATA
from tests.support.small_graphs import make, op, random_step, uniform_chain, words


def crossing_at(storages: Iterable[Storage], position: int) -> tuple[str, ...]:
    return tuple(s.name for s in storages if s.born < position <= s.last_read)


def is_a_partition(graph: Graph, blocks: Blocks) -> bool:
    """Every node in exactly one place, blocks contiguous and in order, the crossings right."""
    forward = [name for block in blocks.forward for name in block]
    backward = [name for segment in reversed(blocks.backward) for name in segment]
    storages = forward_storages(graph)
    starts = [sum(map(len, blocks.forward[:i])) for i in range(len(blocks.forward))]
    return (
        forward == [node.name for node in graph.forward_nodes]
        and [*backward, *blocks.after] == [node.name for node in graph.later_nodes]
        and len(blocks.backward) == len(blocks.crossing) == blocks.n_blocks + 1
        and all(blocks.forward)
        and list(blocks.crossing[:-1]) == [crossing_at(storages, start) for start in starts]
    )


def sizes(blocks: Blocks) -> list[int]:
    return [len(block) for block in blocks.forward]


def test_a_chain_is_cut_everywhere() -> None:
    blocks = split_into_blocks(uniform_chain(5))
    assert blocks.forward == (("f1",), ("f2",), ("f3",), ("f4",), ("f5",))
    assert blocks.crossing == ((), ("x1",), ("x2",), ("x3",), ("x4",), ())
    # b_i reads what block i read
    assert blocks.backward == (("b1",), ("b2",), ("b3",), ("b4",), ("loss", "b5"), ())
    assert blocks.companions == frozenset()


def test_at_most_so_many_blocks() -> None:
    graph = uniform_chain(12)
    for n in range(1, 13):
        blocks = split_into_blocks(graph, max_blocks=n)
        assert is_a_partition(graph, blocks)
        assert blocks.n_blocks == n
        assert max(sizes(blocks)) - min(sizes(blocks)) <= 1 + (12 % n > 0)
    assert split_into_blocks(graph, max_blocks=100) == split_into_blocks(graph)
    with pytest.raises(ValueError, match="max_blocks is 0; it must be at least 1"):
        split_into_blocks(graph, max_blocks=0)


def test_blocks_are_smaller_where_there_is_less_room() -> None:
    graph = uniform_chain(40)
    room = {node.name: 10 + i for i, node in enumerate(graph.forward_nodes)}
    blocks = split_into_blocks(graph, max_blocks=10, room_bytes=room)
    assert is_a_partition(graph, blocks)
    assert blocks.n_blocks == 10
    assert 2 * sum(sizes(blocks)[:5]) < sum(sizes(blocks)[5:])


def test_the_narrowest_cut_of_a_stretch_is_taken() -> None:
    tape = Tape()
    x = tape.input("x", 1)
    for i, size in enumerate((4, 4, 4, 1, 4, 4, 4, 4)):
        x = tape.op(f"f{i}", [x], size_bytes=size, time_s=1.0)
    graph = tape.graph(tape.op("loss", [x], size_bytes=1, time_s=1.0))
    assert split_into_blocks(graph, max_blocks=2).crossing[1] == ("f3",)


def test_residual_branches_are_not_cut() -> None:
    graph = synthetic_graphs.residual(n_blocks=6)
    blocks = split_into_blocks(graph)
    assert blocks.forward[0] == ("stem",)
    assert list(blocks.forward[1]) == words("0.norm 0.conv1 0.relu 0.conv2 0.add")
    assert sizes(blocks) == [1, 5, 5, 5, 5, 5, 5, 1]
    assert blocks.crossing[3] == ("1.add",)
    assert list(blocks.backward[3]) == words(
        # 2.add.backward reads nothing of the forward pass and stays with the segment before
        "2.conv2.backward 2.relu.backward 2.conv1.backward 2.norm.backward grad.1.add@2.norm.add "
        "1.add.backward"
    )
    assert is_a_partition(graph, blocks)


def test_gpt2_is_cut_at_the_ends_of_its_branches() -> None:
    graph = Graph.load(DATA / "gpt2_small_b8_t1024.json")
    blocks = split_into_blocks(graph)
    assert is_a_partition(graph, blocks)
    # two branches in each of 12 layers; embedding, sum, last norm, logits, loss
    assert sizes(blocks) == [1, 3, *([5] * 24), 1, 2, 1]
    stream = [f"add_{i}" if i else "add" for i in range(25)]
    assert list(blocks.crossing[2:27]) == [(name,) for name in stream]
    backward = blocks.backward[10]
    assert any(name.startswith("_scaled_dot_product") for name in graph_inputs(graph, backward))
    assert [len(segment) for segment in blocks.backward[3:26]] == [9, 10] * 11 + [9]


def graph_inputs(graph: Graph, nodes: tuple[str, ...]) -> set[str]:
    return {name for node in nodes for name in graph.node_by_name[node].inputs}


def test_shrinking_tensors_are_cut_on_the_narrow_side() -> None:
    """conv, relu, pool: after the pool is better than before it."""
    tape = Tape()
    x = tape.input("x", 64)
    size = 64
    for i in range(4):
        x = tape.op(f"conv{i}", [x], size_bytes=size, time_s=1.0)
        x = tape.op(f"relu{i}", [x], size_bytes=size, time_s=1.0)
        size //= 4
        x = tape.op(f"pool{i}", [x], size_bytes=size, time_s=1.0)
    graph = tape.graph(tape.op("loss", [x], size_bytes=0, time_s=1.0))
    crossing = {name for names in split_into_blocks(graph).crossing for name in names}
    assert {"pool0", "pool1", "pool2"} <= crossing
    assert not {"relu0", "relu1"} & crossing


@pytest.mark.parametrize("mask_bytes", [1, 100, 10**6])
def test_a_mask_that_crosses_everything_changes_no_cut(mask_bytes: int) -> None:
    def stack(*, masked: bool) -> Graph:
        tape = Tape()
        x = tape.op("embed", [tape.input("tokens", 1)], size_bytes=100, time_s=1.0)
        if masked:
            tape.op("mask", ["tokens"], size_bytes=mask_bytes, time_s=1.0)
        for i in range(8):
            h = tape.op(f"{i}.norm", [x], size_bytes=100, time_s=1.0)
            h = tape.op(f"{i}.scores", [h, "mask"] if masked else [h], size_bytes=400, time_s=1.0)
            h = tape.op(f"{i}.out", [h], size_bytes=100, time_s=1.0)
            x = tape.op(f"{i}.add", [x, h], size_bytes=100, time_s=1.0)
        return tape.graph(tape.op("loss", [x], size_bytes=1, time_s=1.0))

    plain, masked = split_into_blocks(stack(masked=False)), split_into_blocks(stack(masked=True))
    assert masked.companions == {"mask"}
    assert masked.forward[-9:] == plain.forward[-9:]
    assert all("mask" in crossing for crossing in masked.crossing[2:9])
    added = {f"grad.mask@{i}.scores.add" for i in range(8)}
    without = [[name for name in nodes if name not in added] for nodes in masked.backward[-5:]]
    assert without == list(map(list, plain.backward[-5:]))


def test_long_skips_accompany_a_u_shape() -> None:
    graph = synthetic_graphs.u_shape()
    blocks = split_into_blocks(graph)
    assert is_a_partition(graph, blocks)
    assert {"down0.relu1", "down1.relu1"} <= blocks.companions


def test_all_to_all_wiring_keeps_the_features() -> None:
    graph = synthetic_graphs.dense(n_layers=16)
    blocks = split_into_blocks(graph)
    assert is_a_partition(graph, blocks)
    assert "stem" in blocks.companions
    assert not any(name.endswith(".cat") for name in blocks.companions)


def test_a_graph_that_is_nowhere_narrow_is_one_block() -> None:
    """Every node reads everything before it, and so does the last: nothing is ever dropped."""
    nodes = [op(f"f{i}", " ".join(["x", *(f"t{j}" for j in range(i))]), f"t{i}") for i in range(4)]
    nodes.append(op("q", "t0 t1 t2 t3", "g", phase="backward"))
    names = ["x", "t0", "t1", "t2", "t3", "g"]
    blocks = split_into_blocks(make(nodes, dict.fromkeys(names, 1), outputs="g"))
    assert blocks.n_blocks <= 2
    assert blocks.backward[blocks.n_blocks - 1] == ("q",)


def test_one_node_no_node_and_no_backward() -> None:
    one = make([op("f", "x", "a")], {"x": 1, "a": 1}, outputs="a")
    assert split_into_blocks(one).forward == (("f",),)
    assert split_into_blocks(one).backward == ((), ())
    none = make([], {"x": 1})
    assert split_into_blocks(none) == Blocks((), ((),), (), ((),), frozenset())
    later = make([op("b", "x", "a", phase="backward")], {"x": 1, "a": 1})
    assert split_into_blocks(later).backward == (("b",),)
    assert is_a_partition(later, split_into_blocks(later))


def test_the_callers_loss_and_the_optimizer_stand_apart() -> None:
    graph = make(
        [
            op("f", "x", "h"),
            op("g", "h", "y"),
            op("criterion", "y", "loss grad.y", phase="outside"),
            op("g.back", "h grad.y", "grad.h", phase="backward"),
            op("f.back", "x grad.h", "grad.w", phase="backward"),
            op("adam", "grad.w", "", phase="optimizer"),
        ],
        dict.fromkeys(words("x h y loss grad.y grad.h grad.w"), 4),
        outputs="loss",
    )
    blocks = split_into_blocks(graph)
    assert blocks.backward[-1] == ("criterion",)
    assert blocks.after == ("adam",)
    assert blocks.crossing[-1] == ("y",)
    assert is_a_partition(graph, blocks)


def test_a_weight_gradient_put_off_does_not_disturb_the_descent() -> None:
    graph = uniform_chain(6)
    late = op("late", "x5", "grad.w", phase="backward")
    nodes = [*graph.nodes[:-1], late, graph.nodes[-1]]
    tensors = [*graph.tensors, replace(graph.tensors[0], name="grad.w")]
    moved = Graph(nodes=tuple(nodes), tensors=tuple(tensors), outputs=("g0", "grad.w"))
    blocks = split_into_blocks(moved)
    assert blocks.backward[:5] == (("b1",), ("b2", "late"), ("b3",), ("b4",), ("b5",))
    assert is_a_partition(moved, blocks)


def test_names_and_modules_mean_nothing() -> None:
    graph = Graph.load(DATA / "gpt2_small_b8_t1024.json")
    nodes = tuple(replace(n, name=f"n{i}", op="?", module="") for i, n in enumerate(graph.nodes))
    renamed = Graph(nodes=nodes, tensors=graph.tensors, outputs=graph.outputs)
    assert split_into_blocks(renamed).crossing == split_into_blocks(graph).crossing
    assert sizes(split_into_blocks(renamed)) == sizes(split_into_blocks(graph))


@pytest.mark.slow(sample=100)
@pytest.mark.parametrize("seed", range(300))
def test_any_graph_can_be_cut(seed: int) -> None:
    graph = random_step(seed, n_forward=seed % 25, n_later=seed % 13)
    finest = split_into_blocks(graph)
    assert is_a_partition(graph, finest)
    for n in (1, 2, 5):
        blocks = split_into_blocks(graph, max_blocks=n)
        assert is_a_partition(graph, blocks)
        assert blocks.n_blocks <= n
        assert blocks.companions == finest.companions


def test_checkpoints() -> None:
    graph = uniform_chain(6)
    blocks = split_into_blocks(graph, max_blocks=3)
    assert checkpoints(graph, blocks, n_whole=0) == {"x2", "x4"}
    assert checkpoints(graph, blocks, n_whole=1) == {"x2", "x4", "x5", "x6"}
    assert checkpoints(graph, blocks, n_whole=3) == {f"x{i}" for i in range(1, 7)}
    assert checkpoints(graph, blocks, n_whole=9) == checkpoints(graph, blocks, n_whole=3)
