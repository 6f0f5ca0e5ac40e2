"""Plot a schedule by block and time, and how much of each block is live.

Time runs to the right, blocks upwards: the forward pass climbs, the backward pass descends, and
recomputed blocks climb again. The background of each row shows the share of the outputs of the
block's forward ops that is live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes

from graphs.graph import Graph, Node
from solver.chain import Blocks, computing_blocks
from solver.plan_analysis import block_names
from solver.reporting.plot import style
from solver.reporting.plot.of_memory import overhead_text
from solver.reporting.rows import step_name
from solver.schedule import Schedule, Solution, baseline, live_bytes_by, starts_s

HALF = 0.42
"""Half the height of a row, in rows."""
N_NAMED = 16
"""How many blocks are named on the axis at most."""
RUNS = (("forward", style.BLUE), ("recomputed", style.ORANGE), ("backward", style.GREEN))


def schedule(solution: Solution, ax: Axes | None = None) -> Axes:
    """Draw the computes of the plan by block and time, or of the baseline if there is no plan.

    ax: where to draw (None: into a new figure).
    """
    axes = style.new_axes() if ax is None else ax
    graph = solution.graph
    shown = baseline(graph) if solution.schedule is None else solution.schedule
    blocks = computing_blocks(graph)
    rows = _block_of_node(blocks)
    *starts, end_s = starts_s(graph, shown, places=solution.request.places)
    runs = _compute_runs(graph, shown, starts)
    for row, live_shares in _live_shares_by_block(graph, shown, blocks).items():
        axes.stairs(
            [row - HALF + 2 * HALF * share for share in live_shares],
            [*starts, end_s],
            baseline=row - HALF,
            fill=True,
            color=style.LIGHT,
            lw=0,
            label="live" if row == 1 else None,
            zorder=1,
        )
    for kind, (label, colour) in enumerate(RUNS):
        spans = [(s, n.time_s, rows[n.name]) for s, n, k in runs if k == kind and n.name in rows]
        for row in sorted({row for _, _, row in spans}):
            axes.broken_barh(
                [(start_s, time_s) for start_s, time_s, other in spans if other == row],
                (row - HALF, 2 * HALF),
                color=colour,
                lw=0,
                zorder=2,
            )
        axes.bar(0, 0, color=colour, label=label)
    axes.set(xlabel="time in the step (s)", ylabel="block")
    axes.set_xlim(0, None)
    axes.set_ylim(0.4, blocks.n_blocks + 0.6)
    label_step = -(-blocks.n_blocks // N_NAMED)
    labelled_blocks = list(enumerate(block_names(graph), start=1))[::label_step]
    labels = [style.printable(f"{block} {name}").strip() for block, name in labelled_blocks]
    axes.set_yticks([block for block, _ in labelled_blocks], labels, fontsize=7, parse_math=False)
    axes.tick_params(colors=style.INK)
    overhead = "no plan fits" if solution.schedule is None else overhead_text(solution)
    style.finish(axes, f"{step_name(solution.plain)}; {solution.method}: {overhead}")
    axes.grid(visible=False)
    return axes


def _block_of_node(blocks: Blocks) -> dict[str, int]:
    """Node -> its block, from 1; nodes of the optimizer are left out."""
    rows = {}
    for segments in (blocks.forward, blocks.backward[: blocks.n_blocks]):
        for block, names in enumerate(segments, start=1):
            rows.update(dict.fromkeys(names, block))
    return rows


def _compute_runs(
    graph: Graph, shown: Schedule, starts_s: Sequence[float]
) -> list[tuple[float, Node, int]]:
    """(start in seconds, node, index into RUNS) of each compute."""
    runs = []
    seen: set[str] = set()
    for name, start_s in zip(shown.order, starts_s, strict=True):
        node = graph.node_by_name[name]
        runs.append((start_s, node, 2 if node.phase != "forward" else int(name in seen)))
        seen.add(name)
    return runs


def _live_shares_by_block(
    graph: Graph, shown: Schedule, blocks: Blocks
) -> dict[int, Sequence[float]]:
    """Block -> the share of the bytes of its forward storages that is live during each compute."""
    block_of = {
        root: block
        for block, names in enumerate(blocks.forward, start=1)
        for name in names
        for root in graph.node_by_name[name].outputs
        if graph.root(root) == root
    }
    all_bytes: Counter[int] = Counter()
    for root, block in block_of.items():
        all_bytes[block] += graph.tensor_by_name[root].size_bytes
    live = live_bytes_by(graph, shown, lambda stay: block_of.get(stay.storage, 0))
    return {
        block: [held_bytes / (all_bytes[block] or 1) for held_bytes in live[block]]
        for block in sorted(live.keys() - {0})
    }
