"""Keep the input of every block, recompute the rest: what frameworks offer as checkpointing.

This is `torch.utils.checkpoint` around each layer, with the layers found by
`blocks.split_into_blocks`. It is optimal for nothing and has no parameter: it costs about one more
forward pass at any budget, and nothing fits below the sum of the blocks' inputs. It is here as the
well-known reference.

As with checkpoints placed by hand, what no later node reads is not recomputed, and the last block
is kept if it fits, since its backward pass comes first.

Cost: two schedules are made and simulated, each linear in the graph.
"""

from __future__ import annotations

from graphs.graph import Graph
from solver.chain import checkpoints, split_into_blocks
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import keep


def every_block(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """One checkpoint per block; the last block is recomputed only if necessary. No randomness."""
    with BestSoFar(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s) as search:
        blocks = split_into_blocks(graph)
        for n_whole in (1, 0):
            search.deadline.check()
            search.fits(keep(graph, checkpoints(graph, blocks, n_whole=n_whole)))
    return search.proposal()
