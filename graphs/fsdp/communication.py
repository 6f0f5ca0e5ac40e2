"""How long a rank of FSDP2 waits for communication that its operators do not hide.

FSDP2 communicates while operators run. In the forward pass, a group is gathered while the group
before it runs; in the backward pass, from the moment when the group that runs before it begins. A
group's gradients are reduced while the next groups run. All of this goes over one link, one
collective after another, in the times of `graphs.hardware`. Operators wait for their group's
parameters, a reduction waits for the one before it, and the optimizer for the last.

The waits are those of the step without recomputation. They are added to the times of the nodes at
which they occur, so that the times of all nodes add up to that of the step. Recomputed operators
hide further communication, which is not counted: plans that recompute are a little faster than
predicted.
"""

from __future__ import annotations

import dataclasses

from graphs.fsdp.spec import Sharding
from graphs.graph import Graph, Node
from graphs.hardware import Link, all_gather_s, all_reduce_s, reduce_scatter_s

GATHER, COPY_OUT = "fsdp.all_gather", "fsdp.copy_out"
REDUCE, ALL_REDUCE = "fsdp.reduce_scatter", "fsdp.all_reduce"


def with_waits(graph: Graph, sharding: Sharding, link: Link) -> Graph:
    """The sharded step with the waits added to the times of its nodes.

    graph: a sharded step without an optimizer.
    """
    waits = _Clock(graph, sharding, link).waits()
    nodes = tuple(
        dataclasses.replace(node, time_s=node.time_s + waits.get(node.name, 0.0))
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes)


class _Clock:
    """Goes through the step with two clocks: one for the operators and one for the link.

    _now_s: the time of the operators.
    _free_s: when the link is free again.
    _begun_s: when the current group began to run; in the forward pass, the next group is gathered
        from then on.
    _gathered_s: buffer -> when its all-gather is done.
    """

    def __init__(self, graph: Graph, sharding: Sharding, link: Link) -> None:
        self._graph, self._sharding, self._link = graph, sharding, link
        self._now_s = self._free_s = self._begun_s = 0.0
        self._gathered_s: dict[str, float] = {}

    def waits(self) -> dict[str, float]:
        """Node -> seconds that the rank waits before it; for the last reduction, also those that it
        waits for its end."""
        found: dict[str, float] = {}
        reduced_s, last = 0.0, None
        for node in self._graph.nodes:
            ready_s = self._now_s
            # ready_s: when the node can run, as far as communication is concerned
            if node.op == GATHER:  # runs beside the operators; only COPY_OUT waits for it
                begin_s = self._begun_s if node.phase == "forward" else self._now_s
                self._gathered_s[node.outputs[0]] = self._run_on_link(node, begin_s)
            elif node.op == COPY_OUT:
                ready_s = self._gathered_s[node.inputs[0]]
                self._begun_s = max(self._now_s, ready_s)
            elif node.op == REDUCE:  # waits for the reduction before it, not for its own
                ready_s = reduced_s
                reduced_s = self._run_on_link(node, max(self._now_s, ready_s))
                last = node
            elif node.op == ALL_REDUCE:
                reduced_s = self._run_on_link(node, reduced_s)
            wait_s = max(0.0, ready_s - self._now_s)
            found[node.name] = wait_s
            self._now_s += wait_s + node.time_s
        if last is not None:
            found[last.name] += max(0.0, reduced_s - self._now_s)
        return found

    def _run_on_link(self, node: Node, begin_s: float) -> float:
        """When the collective is done, which can begin at `begin_s` if the link is free."""
        seconds, n_ranks, names = {
            GATHER: (all_gather_s, self._sharding.n_ranks, node.outputs),
            REDUCE: (reduce_scatter_s, self._sharding.n_ranks, node.inputs),
            ALL_REDUCE: (all_reduce_s, self._sharding.n_replicas, node.inputs),
        }[node.op]
        n_bytes = sum(self._graph.tensor_by_name[name].size_bytes for name in names)
        begin_s = max(self._free_s, begin_s)
        self._free_s = begin_s + seconds(n_bytes, n_ranks=n_ranks, link=self._link)
        return self._free_s
