"""What a plan saves, drops and recomputes in each block of the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from graphs.graph import Graph
from solver.chain import computing_blocks
from solver.schedule import Solution, baseline, copied_out_for_backward, saved_for_backward


@dataclass(frozen=True)
class BlockRow:
    """What a plan does with one block of the model.

    block: its number in forward order, from 1.
    module: the module path that its ops share, or the first and the last path ("": the graph
        records no modules).
    n_ops: number of its forward ops.
    forward_s: seconds of one forward pass of the block.
    kept_bytes: outputs of its forward ops that are on the device when the backward pass starts.
    dropped_bytes: what the baseline keeps beyond that, without copies on the host or disk.
    n_recomputed: number of recomputes in the block; an op that is recomputed twice counts twice.
    recompute_s: seconds of these recomputes.
    """

    block: int
    module: str
    n_ops: int
    forward_s: float
    kept_bytes: int
    dropped_bytes: int
    n_recomputed: int
    recompute_s: float


def block_rows(solution: Solution) -> tuple[BlockRow, ...]:
    """One row for each block (`solver.chain.computing_blocks`); empty without a schedule."""
    graph, schedule = solution.graph, solution.schedule
    if schedule is None:
        return ()
    kept = saved_for_backward(graph, schedule)
    copied_out = copied_out_for_backward(graph, schedule) - kept
    saved_by_baseline = saved_for_backward(graph, baseline(graph))
    runs = Counter(schedule.order)
    rows = []
    for block, names in enumerate(computing_blocks(graph).forward, start=1):
        nodes = [graph.node_by_name[name] for name in names]
        outputs = {graph.root(name) for node in nodes for name in node.outputs}
        kept_bytes = _total_bytes(graph, outputs & kept)
        baseline_bytes = _total_bytes(graph, outputs & saved_by_baseline)
        copied_bytes = _total_bytes(graph, outputs & copied_out)
        row = BlockRow(
            block=block,
            module=_common_path([node.module for node in nodes]),
            n_ops=len(nodes),
            forward_s=math.fsum(node.time_s for node in nodes),
            kept_bytes=kept_bytes,
            dropped_bytes=max(0, baseline_bytes - kept_bytes - copied_bytes),
            n_recomputed=sum(runs[node.name] - 1 for node in nodes),
            recompute_s=math.fsum((runs[node.name] - 1) * node.time_s for node in nodes),
        )
        rows.append(row)
    return tuple(rows)


def block_names(graph: Graph) -> tuple[str, ...]:
    """The module path of each block, as in `BlockRow.module`."""
    return tuple(
        _common_path(graph.node_by_name[name].module for name in names)
        for names in computing_blocks(graph).forward
    )


def _total_bytes(graph: Graph, names: Iterable[str]) -> int:
    return sum(graph.tensor_by_name[name].size_bytes for name in names)


def _common_path(paths: Iterable[str]) -> str:
    """The path that all modules share: "blocks.0" for blocks.0.attention and blocks.0. If they
    share none, the first and the last: "norm … head"."""
    paths = [path for path in dict.fromkeys(paths) if path]
    if not paths:
        return ""
    parts = [path.split(".") for path in paths]
    same = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    shared = ".".join(column[0] for column in same)
    return shared or f"{paths[0]} … {paths[-1]}"
