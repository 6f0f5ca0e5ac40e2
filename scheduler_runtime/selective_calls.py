"""The operator calls of a checkpointed module that keep their results, and those that are skipped
when it is recomputed: nodes of the graph as calls of eager mode.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from graphs.capture import CPU_RANDOM_STATE_BYTES
from graphs.graph import Graph
from graphs.links import is_collective
from scheduler_runtime.execute import SavedCalls, functional_name, is_random
from solver.module_checkpointing import (
    CheckpointRegion,
    EagerStep,
    MaySave,
    Recomputation,
    RegionLayout,
)

_EAGER_CALLS: Mapping[str, tuple[str, ...]] = {
    "aten._native_batch_norm_legit_functional.default": ("aten.native_batch_norm.default",),
    "checkpoint_solver.dropout_noise.default": (
        "aten.empty_like.default",
        "aten.bernoulli.float",
        "aten.div.Scalar",
    ),
}
"""Operators that a traced graph has where eager mode calls others: these, of which the last one
returns the result."""


def may_save(graph: Graph) -> MaySave:
    """Which results PyTorch's selective checkpointing can keep.

    Not those of our own operators, which eager mode does not call, nor what is overwritten in place
    later, nor buffers, nor what nobody reads; and none of a module with a part that could not be
    traced, whose operators are not known.
    """
    eager = EagerStep.of(graph)
    position = {node.name: at for at, node in enumerate(graph.forward_nodes)}
    known: dict[tuple[str, ...], tuple[Recomputation, frozenset[str]]] = {}

    def is_possible(name: str) -> bool:
        node = graph.node_by_name[name]
        is_buffer = node.outputs and any(
            not reader.outputs for reader in graph.consumers[node.outputs[0]]
        )
        return bool(eager_calls(node.op)) and not is_buffer

    def of(region: CheckpointRegion) -> tuple[Recomputation, frozenset[str]]:
        """What its recomputation runs, and which of its results can be kept."""
        if region.nodes not in known:
            whole = replace(region, saved=frozenset())
            recomputation = Recomputation.of(RegionLayout(graph, (whole,)), whole)
            nodes = [graph.node_by_name[name] for name in region.nodes]
            is_known = all(operator_named(n.op) is not None for n in nodes)
            possible = filter(is_possible, region.nodes if is_known else ())
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


def eager_calls(op: str) -> tuple[str, ...]:
    """What eager mode calls in the place of a node with this operator: functional forms. (): it is
    none of PyTorch's operators."""
    is_torch = op.startswith("aten.") or is_collective(op)
    calls = _EAGER_CALLS.get(op, (op,) if is_torch else ())
    return tuple(map(functional_name, calls))


def extra_bytes(graph: Graph) -> Callable[[CheckpointRegion], int]:
    """The random states that are held for a checkpointed call: the first, and where it skips
    operators, one for each that draws."""

    def of_region(region: CheckpointRegion) -> int:
        operators = (operator_named(graph.node_by_name[name].op) for name in region.nodes)
        n_states = sum(map(is_random, operators)) if region.saved else 0
        return CPU_RANDOM_STATE_BYTES * (1 + n_states)

    return of_region


@functools.cache
def operator_named(op: str) -> torch._ops.OpOverload | None:
    """The operator of this name; None: it is none, but a part that could not be traced."""
    operator: Any = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return operator if isinstance(operator, torch._ops.OpOverload) else None


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
        *before, last = eager_calls(node.op) or (node.op,)
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
