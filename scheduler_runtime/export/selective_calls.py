"""The operator calls of a checkpointed module that keep their results, and those that are skipped
when it is recomputed: nodes of the graph as calls of eager mode.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from graphs.capture import CPU_RANDOM_STATE_BYTES
from graphs.graph import Graph, Node
from graphs.hardware import is_collective
from graphs.zero import zero_words
from scheduler_runtime.execute import SavedCalls, functional_name, is_random, operator_named
from solver.module_checkpointing import (
    CheckpointRegion,
    EagerStep,
    MaySave,
    Recomputation,
    RegionLayout,
)

_FILLS: Mapping[str, str] = {
    "checkpoint_solver.bernoulli_fill.default": "aten.bernoulli_.float",
    "checkpoint_solver.normal_fill.default": "aten.normal_.default",
    "checkpoint_solver.random_fill.default": "aten.random_.from",
}
"""Our operators of which eager mode calls one that fills a tensor; the graph copies theirs into it.
"""

_EAGER_CALLS: Mapping[str, tuple[str, ...]] = {
    "aten._native_batch_norm_legit_functional.default": ("aten.native_batch_norm.default",),
    "checkpoint_solver.dropout_noise.default": (
        "aten.empty_like.default",
        "aten.bernoulli_.float",
        "aten.div_.Scalar",
    ),
    **{ours: (eager,) for ours, eager in _FILLS.items()},
}
"""Operators that a traced graph has where eager mode calls others: these, of which the last one
returns the result."""

_NOT_KEPT = frozenset(
    {
        *_FILLS,  # what they are copied into is used instead
        "aten.as_strided_scatter.default",
        "aten.diagonal_scatter.default",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
        "aten.lift_fresh_copy.default",
        "aten.rrelu_with_noise_functional.default",
    }
)
"""Operators of a traced graph in the place of which eager mode makes a view and writes there, or
writes one of the results into an argument."""


def may_save(graph: Graph) -> MaySave:
    """Which results PyTorch's selective checkpointing can keep.

    Not those of our own operators, which eager mode does not call, nor what is overwritten in place
    later, nor buffers, nor what nobody reads; and none of a module with a part that could not be
    traced, whose operators are not known, nor under ZeRO-3, whose engine calls others for
    `F.linear`.
    """
    is_replaced = bool(zero_words(graph.meta.environment, sharded=True))
    eager = EagerStep.of(graph)
    position = {node.name: at for at, node in enumerate(graph.forward_nodes)}
    known: dict[tuple[str, ...], tuple[Recomputation, frozenset[str]]] = {}

    def is_possible(name: str) -> bool:
        node = graph.node_by_name[name]
        is_buffer = node.outputs and any(
            not reader.outputs for reader in graph.consumers[node.outputs[0]]
        )
        return can_be_kept(graph, node) and not is_buffer

    def of(region: CheckpointRegion) -> tuple[Recomputation, frozenset[str]]:
        """What its recomputation runs, and which of its results can be kept."""
        if region.nodes not in known:
            whole = replace(region, saved=frozenset())
            recomputation = Recomputation.of(RegionLayout(graph, (whole,)), whole)
            nodes = [graph.node_by_name[name] for name in region.nodes]
            is_known = all(operator_named(n.op) is not None for n in nodes)
            possible = filter(is_possible, region.nodes if is_known and not is_replaced else ())
            known[region.nodes] = recomputation, frozenset(possible)
        return known[region.nodes]

    def possible(region: CheckpointRegion) -> frozenset[str]:
        recomputation, can_be_kept = of(region)
        saved = region.saved & can_be_kept
        while True:
            fine = frozenset(
                name
                for name, outputs in recomputation.kept(saved).items()
                if all(eager.last_write.get(out, -1) <= position[name] for out in outputs)
            )
            if fine == saved:
                return saved
            saved = fine

    return possible


def eager_calls(graph: Graph, node: Node) -> tuple[str, ...]:
    """What eager mode calls in the place of a node: functional forms. (): none of PyTorch's
    operators."""
    op = node.op
    if op == "aten.copy.default" and any(
        name in graph.producer and graph.producer[name].op in _FILLS for name in node.inputs
    ):
        return ()
    is_torch = op.startswith("aten.") or is_collective(op)
    calls = _EAGER_CALLS.get(op, (op,) if is_torch else ())
    return tuple(map(functional_name, calls))


def can_be_kept(graph: Graph, node: Node) -> bool:
    """Whether eager mode calls an operator that returns what the node makes."""
    return node.op not in _NOT_KEPT and bool(eager_calls(graph, node))


def extra_bytes(graph: Graph) -> Callable[[CheckpointRegion], int]:
    """The random states that are held for a checkpointed call: the first, and where it skips
    operators, one for each that draws."""

    def of_region(region: CheckpointRegion) -> int:
        operators = (operator_named(graph.node_by_name[name].op) for name in region.nodes)
        n_states = sum(map(is_random, operators)) if region.saved else 0
        return CPU_RANDOM_STATE_BYTES * (1 + n_states)

    return of_region


def saved_calls(layout: RegionLayout, region: CheckpointRegion) -> SavedCalls:
    """The calls of eager mode that the region keeps and skips."""
    seen: Counter[str] = Counter()
    saved: defaultdict[str, set[int]] = defaultdict(set)
    skipped: defaultdict[str, set[int]] = defaultdict(set)
    without_first: defaultdict[str, set[int]] = defaultdict(set)
    recomputation = Recomputation.of(layout, region)
    recomputed = recomputation.runs(region.saved)
    kept = recomputation.kept(region.saved)
    for name in region.nodes:
        node = layout.graph.node_by_name[name]
        is_skipped = node.recomputable and name not in recomputed
        *before, last = eager_calls(layout.graph, node) or (name,)
        for operator in before:
            if is_skipped:
                skipped[operator].add(seen[operator])
            seen[operator] += 1
        if name in region.saved:
            saved[last].add(seen[last])
            if kept.get(name) != node.outputs:
                without_first[last].add(seen[last])
        elif is_skipped:
            skipped[last].add(seen[last])
        seen[last] += 1
    return SavedCalls(
        region.path,
        {operator: frozenset(calls) for operator, calls in saved.items()},
        {operator: frozenset(calls) for operator, calls in without_first.items()},
        {operator: frozenset(calls) for operator, calls in skipped.items()},
        {operator: seen[operator] for operator in (saved | skipped)},
        of_parts=any(is_collective(node.op) for node in layout.graph.nodes),
    )
