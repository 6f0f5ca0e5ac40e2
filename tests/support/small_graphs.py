"""Write small graphs by hand, and their schedules as one line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphs.graph import Graph, Node, Phase, Tensor
from solver.schedule.ops import WORDS, Compute, Free, Op, Schedule
from tests.support.synthetic_graphs import random_dag


def op(
    name: str,
    inputs: str,
    outputs: str,
    *,
    time_s: float = 1.0,
    workspace_bytes: int = 0,
    phase: Phase = "forward",
    recomputable: bool = True,
) -> Node:
    """A node. inputs, outputs: names separated by spaces."""
    return Node(
        name=name,
        op="op",
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        time_s=time_s,
        workspace_bytes=workspace_bytes,
        phase=phase,
        recomputable=recomputable,
    )


def make(
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    *,
    aliases: Mapping[str, str] | None = None,
    outputs: str = "",
) -> Graph:
    """A graph.

    sizes: tensor -> bytes, for all tensors.
    aliases: tensor -> the tensor whose storage it shares.
    outputs: names separated by spaces.
    """
    aliases = aliases or {}
    return Graph(
        nodes=tuple(nodes),
        tensors=tuple(Tensor(name, n, alias_of=aliases.get(name)) for name, n in sizes.items()),
        outputs=tuple(outputs.split()),
    )


def words(text: str) -> list[str]:
    return text.split()


def plan(graph: Graph, text: str) -> Schedule:
    """A schedule from text: "f g -a f store:b" is run f, run g, free a, run f, store b."""
    return Schedule(ops=tuple(map(_op, text.split())), graph_id=graph.graph_id)


def _op(text: str) -> Op:
    word, colon, name = text.partition(":")
    if colon:
        return WORDS[word](name)
    return Free(text[1:]) if text.startswith("-") else Compute(text)


def uniform_chain(n_blocks: int, *, unit_bytes: int = 1) -> Graph:
    """A chain: x_0 -> x_1 -> … -> x_n, and the backward node of block i reads x_{i-1} and the
    gradient of x_i.

    x_0 is resident; a first backward node makes the gradient of x_n from x_n. All tensors have one
    size, and every node takes one second.
    """
    nodes = [op(f"f{i}", f"x{i - 1}", f"x{i}") for i in range(1, n_blocks + 1)]
    nodes.append(op("loss", f"x{n_blocks}", f"g{n_blocks}", phase="backward"))
    nodes += [
        op(f"b{i}", f"x{i - 1} g{i}", f"g{i - 1}", phase="backward") for i in range(n_blocks, 0, -1)
    ]
    names = [f"{letter}{i}" for letter in "xg" for i in range(n_blocks + 1)]
    return make(nodes, dict.fromkeys(names, unit_bytes), outputs="g0")


def random_step(seed: int, *, n_forward: int = 7, n_later: int = 5) -> Graph:
    """A random DAG; in every third, some later nodes are the caller's or the optimizer's."""
    graph = random_dag(seed=seed, n_forward=n_forward, n_later=n_later)
    if seed % 3:
        return graph
    n_outside = (seed // 3) % 3
    n_optimizer = (seed // 9) % 2
    first, last = n_forward + n_outside, len(graph.nodes) - n_optimizer
    nodes = [
        replace(node, phase=_phase(node.phase, index, first, last))
        for index, node in enumerate(graph.nodes)
    ]
    return replace(graph, nodes=tuple(nodes))


def _phase(phase: Phase, index: int, first: int, last: int) -> Phase:
    if phase == "forward":
        return phase
    return "outside" if index < first else "backward" if index < last else "optimizer"
