"""Which operator calls of a checkpointed module keep their results or are skipped.

Translates the nodes of a traced graph to the calls that eager mode makes: those whose results are
kept, and those that do not run when the module is recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from graphs.capture import CPU_RANDOM_STATE_BYTES, may_be_random
from graphs.graph import Graph, Node, is_under
from graphs.hardware import is_collective
from graphs.zero import zero_words
from scheduler_runtime.execute import SavedCalls, functional_name, operator_named
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
"""Our operators that return random numbers -> the in-place operator that eager mode calls instead.
The graph copies the numbers into the tensor that eager mode fills."""

_EAGER_CALLS: Mapping[str, tuple[str, ...]] = {
    "aten._native_batch_norm_legit_functional.default": ("aten.native_batch_norm.default",),
    "checkpoint_solver.dropout_noise.default": (
        "aten.empty_like.default",
        "aten.bernoulli_.float",
        "aten.div_.Scalar",
    ),
    **{ours: (eager,) for ours, eager in _FILLS.items()},
}
"""Operator of a traced graph -> the operators that eager mode calls instead. The last of them
returns the result."""

_NOT_KEPT = frozenset(
    {
        *_FILLS,  # the tensor that their numbers are copied into can be kept instead
        "aten.as_strided_scatter.default",
        "aten.diagonal_scatter.default",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
        "aten.lift_fresh_copy.default",
        "aten.rrelu_with_noise_functional.default",
    }
)
"""Operators of a traced graph for which eager mode writes into a view, or writes one of the results
into an argument, so that no eager call returns their result."""


def may_save(graph: Graph) -> MaySave:
    """Which results PyTorch's selective checkpointing can keep: a function that takes a region and
    returns those of its saved nodes for which that is possible.

    It cannot keep results of our own operators (eager mode does not call them), results that are
    overwritten in place later, buffers, or results that nobody reads. It keeps nothing in a module
    with a part that could not be traced, whose operators are unknown, and nothing under ZeRO-3,
    whose engine calls other operators for `F.linear`.
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

    def recomputation_of(region: CheckpointRegion) -> tuple[Recomputation, frozenset[str]]:
        """The region's recomputation, and which of the region's results can be kept at all."""
        if region.nodes not in known:
            without_saved = replace(region, saved=frozenset())
            recomputation = Recomputation.of(RegionLayout(graph, (without_saved,)), without_saved)
            nodes = [graph.node_by_name[name] for name in region.nodes]
            is_known = all(operator_named(n.op) is not None for n in nodes)
            possible = filter(is_possible, region.nodes if is_known and not is_replaced else ())
            known[region.nodes] = recomputation, frozenset(possible)
        return known[region.nodes]

    def possible(region: CheckpointRegion) -> frozenset[str]:
        recomputation, can_be_kept = recomputation_of(region)
        saved = region.saved & can_be_kept
        while True:  # which results are read depends on which are kept, so until nothing changes
            still_possible = frozenset(
                name
                for name, outputs in recomputation.kept_outputs(saved).items()
                if all(eager.last_write.get(out, -1) <= position[name] for out in outputs)
            )
            if still_possible == saved:
                return saved
            saved = still_possible

    return possible


def eager_calls(graph: Graph, node: Node) -> tuple[str, ...]:
    """The operators that eager mode calls for a node, named by their functional forms. (): eager
    mode calls no operator of PyTorch for it."""
    op = node.op
    if op == "aten.copy.default" and any(
        name in graph.producer and graph.producer[name].op in _FILLS for name in node.inputs
    ):
        return ()
    is_torch = op.startswith("aten.") or is_collective(op)
    calls = _EAGER_CALLS.get(op, (op,) if is_torch else ())
    return tuple(map(functional_name, calls))


def dead_calls(graph: Graph, nodes: Sequence[str], path: str = "") -> Mapping[str, Sequence[str]]:
    """The operators that dead code calls in the module at this path, named by their functional
    forms: node of the module after which they are called ("": before all of them) -> these.

    nodes: the module's nodes.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    of_module = frozenset(nodes)
    for call in graph.meta.dead_calls:
        if is_under(call["module"], path):
            after = call["after"] if call["after"] in of_module else ""
            found[after].append(functional_name(call["operator"]))
    return found


def can_be_kept(graph: Graph, node: Node) -> bool:
    """Whether eager mode calls an operator that returns the node's results."""
    return node.op not in _NOT_KEPT and bool(eager_calls(graph, node))


def extra_bytes(graph: Graph) -> Callable[[CheckpointRegion], int]:
    """A function that gives the bytes of random states held for a checkpointed call of a region.

    One state from before the call; if operators are skipped, also one for each random operator."""

    def of_region(region: CheckpointRegion) -> int:
        operators = (operator_named(graph.node_by_name[name].op) for name in region.nodes)
        n_states = sum(map(may_be_random, operators)) if region.saved else 0
        return CPU_RANDOM_STATE_BYTES * (1 + n_states)

    return of_region


def saved_calls(layout: RegionLayout, region: CheckpointRegion) -> SavedCalls:
    """The operator calls of eager mode whose results the region keeps, and those that it skips.

    Calls are counted per operator, in the order of the forward pass: that is how the selective
    checkpointing policy recognises them."""
    dead = dead_calls(layout.graph, region.nodes, region.path)
    seen = Counter(dead.get("", ()))
    saved: defaultdict[str, set[int]] = defaultdict(set)
    skipped: defaultdict[str, set[int]] = defaultdict(set)
    without_first: defaultdict[str, set[int]] = defaultdict(set)
    recomputation = Recomputation.of(layout, region)
    recomputed = recomputation.nodes_to_run(region.saved)
    kept = recomputation.kept_outputs(region.saved)
    for name in region.nodes:
        node = layout.graph.node_by_name[name]
        is_skipped = node.recomputable and name not in recomputed
        *before, last = eager_calls(layout.graph, node) or (name,)
        for operator in before:  # they only prepare the result, so they are never saved
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
        seen.update(dead.get(name, ()))
    return SavedCalls(
        region.path,
        {operator: frozenset(calls) for operator, calls in saved.items()},
        {operator: frozenset(calls) for operator, calls in without_first.items()},
        {operator: frozenset(calls) for operator, calls in skipped.items()},
        {operator: seen[operator] for operator in (saved | skipped)},
        counts_local_parts=any(is_collective(node.op) for node in layout.graph.nodes),
    )
