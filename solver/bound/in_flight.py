"""Bounds for a step with several micro-batches in flight, by spans of the bytes that they save.

A pipeline has several micro-batches in flight, and a loss over several calls of the model has
several passes in flight; both are called micro-batches here.

With m of them in flight, each of the other m - 1 holds what the schedule has saved at the end of
its forward pass, so what fits depends on the schedule itself. Take only the schedules that save at
least `least_bytes` and at most `most_bytes`. Each of them is also legal, within the same budget, in
the *span graph*, a step with one micro-batch in flight:

- The others hold (m - 1) * least_bytes until the optimizer runs. This is a resident tensor or, if
  there is an optimizer, one that a node before all others makes and a node after all backward nodes
  reads.
- A node between forward and backward pass (FORWARD_END) takes as workspace what the budget has left
  beside that and most_bytes, so that no more than most_bytes can be saved.
- Gradients that all micro-batches add to are on the device while later micro-batches run. By how
  much `Graph.awaited_bytes` exceeds most_bytes, FORWARD_END makes tensors, and has that much less
  workspace. A later node reads one of them for the last time wherever awaited_bytes falls. What
  `Graph.summed_bytes` adds is workspace of the later nodes.

So a bound on the span graph bounds these schedules, and the least bound over spans that cover
everything that can be saved bounds all schedules. A schedule of a span graph with least_bytes =
most_bytes fits the step itself. `docs/theory.md` has the proof.

At the end of the forward pass the step holds its own saved bytes and m - 1 times as many for the
others, so no schedule saves more than one m-th of the budget without resident bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np

from graphs.graph import Graph, Node, Tensor
from solver.bound.storage_graph import Bytes, StorageGraph
from solver.schedule import Compute, Schedule, name_in

OTHER_MICRO_BATCHES, BEGIN, FORWARD_END, AWAITED, BACKWARD_END = (
    f"in_flight.{name}" for name in ("others", "begin", "turn", "late", "end")
)


@dataclass(frozen=True, order=True)
class Span:
    """The schedules that save between least_bytes and most_bytes, both included.

    lost_share: the least that they lose, as a share of the baseline's time (inf: none fits). It is
        the first field so that the least of several spans is the one whose bound holds for all.
    """

    lost_share: float
    least_bytes: int
    most_bytes: int

    @property
    def width_bytes(self) -> int:
        return self.most_bytes - self.least_bytes


def whole_span(graph: Graph, *, budget_bytes: int) -> Span:
    """The span of all that a schedule within the budget can save, with nothing proven yet.

    lost_share is inf if no schedule fits.
    """
    folded = StorageGraph.of(graph)
    least_bytes = folded.least_saved_bytes
    room_bytes = budget_bytes - graph.resident_bytes
    most_bytes = min(room_bytes // graph.n_in_flight, folded.made_bytes)
    if held_bytes := graph.others_bytes:  # each of the others counts as saving at least this
        fits = (graph.n_in_flight - 1) * held_bytes + least_bytes <= room_bytes
        least_bytes, most_bytes = max(least_bytes, held_bytes), max(most_bytes, held_bytes)
        most_bytes = most_bytes if fits else -1
    lost_share = 0.0 if least_bytes <= most_bytes else math.inf
    return Span(lost_share, least_bytes, most_bytes)


def least_in_flight_bytes(folded: StorageGraph) -> Bytes:
    """By position p: bytes on the device while p runs in any schedule, with those of the others."""
    graph = folded.graph
    each_bytes = max(folded.least_saved_bytes, graph.others_bytes)
    others_bytes = np.full(folded.n_nodes + 1, (graph.n_in_flight - 1) * each_bytes)
    awaited_bytes = np.add(graph.awaited_bytes, graph.summed_bytes)
    others_bytes[folded.n_forward : folded.n_nodes] += np.maximum(0, awaited_bytes - each_bytes)
    others_bytes[graph.n_before_optimizer :] = 0
    least: Bytes = folded.least_bytes + others_bytes
    return least


def halves(span: Span) -> tuple[Span, Span]:
    """Two spans that together cover this one, which must be wider than a byte."""
    middle = (span.least_bytes + span.most_bytes) // 2
    return (
        dataclasses.replace(span, most_bytes=middle),
        dataclasses.replace(span, least_bytes=middle + 1),
    )


def span_graph(
    graph: Graph, span: Span, *, budget_bytes: int, others_bytes: int | None = None
) -> Graph:
    """The span graph that the module describes.

    others_bytes: what the other micro-batches hold together, if not all of them are of this step.
    """
    if others_bytes is None:
        others_bytes = (graph.n_in_flight - 1) * span.least_bytes
    spare_bytes = budget_bytes - graph.resident_bytes - others_bytes - span.most_bytes
    has_outside = any(node.phase == "outside" for node in graph.nodes)
    awaited_bytes = _awaited_bytes_freed_after(graph, span)
    sum_bytes = _sum_workspace_bytes(graph, span)
    awaited_tensors = tuple(
        Tensor(f"{AWAITED}.{index}", size_bytes) for index, size_bytes in awaited_bytes.items()
    )
    forward_end = Node(
        name=FORWARD_END,
        op=FORWARD_END,
        inputs=(),
        outputs=tuple(tensor.name for tensor in awaited_tensors),
        time_s=0.0,
        workspace_bytes=max(0, spare_bytes - sum(awaited_bytes.values())),
        phase="outside" if has_outside else "backward",
        recomputable=False,
    )
    later_nodes = [
        dataclasses.replace(
            node,
            inputs=(*node.inputs, *([f"{AWAITED}.{index}"] if index in awaited_bytes else [])),
            workspace_bytes=node.workspace_bytes + sum_bytes.get(index, 0),
        )
        for index, node in enumerate(graph.later_nodes)
        if node.phase != "optimizer"
    ]
    optimizer = [node for node in graph.later_nodes if node.phase == "optimizer"]
    before, after = [], []
    if optimizer:
        before.append(Node(BEGIN, BEGIN, (), (OTHER_MICRO_BATCHES,), 0.0, recomputable=False))
        after.append(
            Node(
                BACKWARD_END,
                BACKWARD_END,
                (OTHER_MICRO_BATCHES,),
                (),
                0.0,
                phase="backward",
                recomputable=False,
            )
        )
    return dataclasses.replace(
        graph,
        nodes=(*before, *graph.forward_nodes, forward_end, *later_nodes, *after, *optimizer),
        tensors=(*graph.tensors, *awaited_tensors, Tensor(OTHER_MICRO_BATCHES, others_bytes)),
        n_in_flight=1,
        accumulated=(),
        others_bytes=0,
        in_turn=False,
    )


def _awaited_bytes_freed_after(graph: Graph, span: Span) -> dict[int, int]:
    """Index of a later node -> awaited bytes above most_bytes that are gone after it."""
    excess_bytes = [max(0, each - span.most_bytes) for each in graph.awaited_bytes]
    differences = enumerate(itertools.pairwise([*excess_bytes, 0]))
    return {index: now - then for index, (now, then) in differences if now > then}


def _sum_workspace_bytes(graph: Graph, span: Span) -> dict[int, int]:
    """Index of a later node -> workspace for the sums that it completes, beyond awaited bytes."""
    both = zip(graph.awaited_bytes, graph.summed_bytes, strict=True)
    found = {
        index: max(0, awaited + summed - max(awaited, span.most_bytes))
        for index, (awaited, summed) in enumerate(both)
    }
    return {index: size_bytes for index, size_bytes in found.items() if size_bytes}


def without_span_nodes(graph: Graph, schedule: Schedule) -> Schedule:
    """A schedule of a span graph as one of the step itself, without the added nodes and tensors."""
    ops = tuple(
        op
        for op in schedule.ops
        if name_in(op) in (graph.node_by_name if isinstance(op, Compute) else graph.tensor_by_name)
    )
    return Schedule(ops, graph_id=graph.graph_id)
