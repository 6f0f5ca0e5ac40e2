"""Steps with an optimizer whose state may be on the host."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from graphs.graph import Graph, Node, Tensor
from graphs.host_state import StateBucket
from tests.support.synthetic_graphs import random_dag


def with_state(
    graph: Graph,
    buckets: Sequence[StateBucket],
    *,
    kept_bytes: int = 0,
    workspace_bytes: int = 0,
    time_s: float = 1.0,
) -> Graph:
    """The step with an optimizer that reads every gradient.

    buckets: the parts of the state that may be on the host.
    kept_bytes: state that stays on the device.
    """
    state_bytes = kept_bytes + sum(bucket.state_bytes for bucket in buckets)
    reads = tuple(
        name
        for name in graph.outputs
        if name in graph.producer and graph.producer[name].phase == "backward"
    )
    step = Node(
        name="optimizer_step",
        op="Adam",
        inputs=(*reads, "optimizer_state"),
        outputs=(),
        time_s=time_s,
        workspace_bytes=workspace_bytes,
        phase="optimizer",
        recomputable=False,
    )
    optimizer = {
        "name": "Adam",
        "state_bytes": state_bytes,
        "workspace_bytes": workspace_bytes,
        "time_s": time_s,
        "buckets": [list(dataclasses.astuple(bucket)) for bucket in buckets],
        "kept_state_bytes": kept_bytes,
    }
    return dataclasses.replace(
        graph,
        nodes=(*graph.nodes, step),
        tensors=(*graph.tensors, Tensor("optimizer_state", state_bytes, "optimizer_state")),
        meta=graph.meta.with_environment(optimizer=optimizer),
    )


def with_some_state(graph: Graph, rng: random.Random, *, most_bytes: int) -> Graph:
    """The step with an optimizer whose state has one to three random buckets, of at most
    `most_bytes` each."""
    buckets = [
        StateBucket(1, rng.randint(1, most_bytes), rng.randint(0, 2), float(rng.randint(0, 3)))
        for _ in range(rng.randint(1, 3))
    ]
    return with_state(
        graph,
        buckets,
        kept_bytes=rng.randint(0, 1),
        workspace_bytes=rng.randint(0, 3),
        time_s=sum(bucket.time_s for bucket in buckets),
    )


def with_parameters(
    graph: Graph, names: Sequence[str], buckets: Sequence[tuple[int, int, float]]
) -> Graph:
    """Make the resident tensors of these names parameters, which an optimizer trains in this order.

    buckets: for each, how many parameters it has, their bytes of state, and seconds.
    """
    graph = with_state(
        graph,
        [StateBucket(n, state_bytes, 0, time_s) for n, state_bytes, time_s in buckets],
        time_s=sum(time_s for *_, time_s in buckets),
    )
    tensors = tuple(
        dataclasses.replace(t, kind="parameter") if t.name in names else t for t in graph.tensors
    )
    resident = [tensor.name for tensor in tensors if tensor.name in names]
    *nodes, step = graph.nodes
    step = dataclasses.replace(step, inputs=(*step.inputs[:-1], *resident, *step.inputs[-1:]))
    paths = {f"m.{name}": name for name in names}
    optimizer = {**graph.meta.environment["optimizer"], "trains": list(paths)}
    meta = dataclasses.replace(graph.meta, parameters=paths)
    return dataclasses.replace(
        graph,
        nodes=(*nodes, step),
        tensors=tensors,
        meta=meta.with_environment(optimizer=optimizer),
    )


def with_some_parameters(seed: int, rng: random.Random, *, n_later: int = 2) -> Graph:
    """A random step whose nodes read some of one to three parameters."""
    graph = random_dag(seed=seed, n_forward=rng.randint(2, 3), n_later=rng.randint(1, n_later))
    names = [f"q{i}" for i in range(rng.randint(1, 3))]
    nodes = [
        dataclasses.replace(
            node, inputs=(*node.inputs, *(name for name in names if rng.random() < 0.5))
        )
        for node in graph.nodes
    ]
    tensors = [Tensor(name, rng.randint(1, 6)) for name in names]
    graph = dataclasses.replace(graph, nodes=tuple(nodes), tensors=(*graph.tensors, *tensors))
    buckets = [(1, rng.randint(1, 6), float(rng.randint(0, 2))) for _ in names]
    return with_parameters(graph, names, buckets)
