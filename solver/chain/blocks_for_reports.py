"""The blocks of a chain that compute something, for reports.

A block that only updates buffers (batch norm counts its calls and keeps running averages) makes
nothing that the step reads. Methods may cut there, but a table of blocks should have no row for it.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from graphs.graph import Graph
from solver.chain.blocks import Blocks, split_into_blocks


def computing_blocks(graph: Graph) -> Blocks:
    """As `split_into_blocks`, but blocks that only update buffers are merged into another.

    Each is merged into the block before it, or into the next one if there is none before.
    """
    blocks = split_into_blocks(graph)
    needed = {graph.root(name) for node in graph.later_nodes for name in node.inputs}
    needed |= {graph.root(name) for name in graph.outputs}
    bookkeeping = set()  # forward nodes whose outputs are only read by nodes that make nothing
    for node in reversed(graph.forward_nodes):
        if needed.isdisjoint(map(graph.root, node.outputs)):
            bookkeeping.add(node.name)
        else:
            needed.update(map(graph.root, node.inputs))
    computes = [not bookkeeping.issuperset(names) for names in blocks.forward]
    # Number the blocks by how many computing blocks there are up to them: equal numbers merge.
    numbers = [max(1, number) for number in accumulate(computes)]
    starts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1])]
    spans = list(pairwise([*starts, len(numbers)])) if numbers else []
    return Blocks(
        forward=tuple(sum(blocks.forward[start:stop], ()) for start, stop in spans),
        backward=(
            *(sum(reversed(blocks.backward[start:stop]), ()) for start, stop in spans),
            blocks.backward[-1],
        ),
        after=blocks.after,
        crossing=(*(blocks.crossing[start] for start, _ in spans), blocks.crossing[-1]),
        companions=blocks.companions,
    )
