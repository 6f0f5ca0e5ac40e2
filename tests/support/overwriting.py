"""Tiny random graphs whose nodes overwrite inputs that they are the last to read."""

from __future__ import annotations

import random
from dataclasses import replace

from graphs.graph import Graph, Node, Tensor


def overwriting_dag(seed: int) -> Graph:
    """A graph of four to nine nodes, with an overwrite wherever one is legal."""
    rng = random.Random(f"overwriting {seed}")
    n_forward, n_later = rng.randint(2, 4), rng.randint(2, 5)
    tensors = [Tensor("p", rng.randint(0, 3), "parameter")]
    nodes: list[Node] = []
    for i in range(n_forward + n_later):
        is_later = i >= n_forward
        recent = [t.name for t in (tensors[-2:] if is_later else tensors[-3:])]
        inputs = [recent[-1], *rng.sample(recent, k=rng.randint(0, len(recent)))]
        if is_later:  # reads what the forward pass saved
            inputs.append(f"t{rng.randrange(n_forward)}")
        tensors.append(Tensor(f"t{i}", rng.choice((1, 2, 3, 4, 6))))
        nodes.append(
            Node(
                name=f"n{i}",
                op="op",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=(f"t{i}",),
                time_s=float(rng.choice((0, 1, 1, 2, 3, 5))),
                workspace_bytes=rng.choice((0, 0, 0, 1, 3)),
                phase="backward" if is_later else "forward",
                recomputable=not is_later and rng.random() < 0.8,
            )
        )
    names = [f"t{i}" for i in range(n_forward + n_later)]
    outputs = {name for name in names if rng.random() < 0.1} | {names[-1]}
    return with_overwrites(Graph(tuple(nodes), tuple(tensors), tuple(sorted(outputs))))


def with_overwrites(graph: Graph) -> Graph:
    """Let each node with one output overwrite an input that nothing reads later, if all nodes that
    make or read this input or the output run only once."""
    last = {name: node.name for node in graph.nodes for name in node.inputs}
    root: dict[str, str] = {}
    nodes = []
    touching = graph.consumers.__getitem__
    for node in graph.nodes:
        for old in node.inputs:
            maker = graph.producer.get(old)
            if (
                len(node.outputs) == 1
                and graph.tensor_by_name[node.outputs[0]].alias_of is None
                and maker is not None
                and all(map(_runs_once, (maker, *touching(old), *touching(node.outputs[0]))))
                and last[old] == node.name
                and old not in graph.outputs
                and old not in graph.views
                and graph.tensor_by_name[old].alias_of is None
            ):
                root[node.outputs[0]] = root.get(old, old)
                node = replace(node, overwrites=old)
                break
        nodes.append(node)
    tensors = [replace(t, alias_of=root.get(t.name, t.alias_of)) for t in graph.tensors]
    return replace(graph, nodes=tuple(nodes), tensors=tuple(tensors))


def _runs_once(node: Node) -> bool:
    return node.phase != "forward" or not node.recomputable
