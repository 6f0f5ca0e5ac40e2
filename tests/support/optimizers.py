"""Steps with an optimizer whose state may be on the host."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from graphs.graph import Graph, Node, Tensor
from graphs.host_state import StateBucket


def with_state(
    graph: Graph,
    buckets: Sequence[StateBucket],
    *,
    kept_bytes: int = 0,
    workspace_bytes: int = 0,
    time_s: float = 1.0,
) -> Graph:
    """The step with an optimizer that reads every gradient."""
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
    """Of one to three buckets, up to most_bytes each."""
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
