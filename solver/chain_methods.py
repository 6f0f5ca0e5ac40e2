"""`revolve` on a graph: reverse the chain of its blocks, play the actions, have them judged.

Andreas Griewank, Andrea Walther: Algorithm 799: revolve, ACM TOMS 26 (2000); the chain problem
itself is `solver.revolve`. Optimal in forward steps for a chain of equal steps and a number of
snapshots: here, of blocks and of block inputs held at once. How many snapshots fit is for the judge
to say, by bisection.

On a graph it falls short where blocks are unequal in time or bytes, and where memory would allow
more than inputs to be kept: it runs every block but the last again, whatever the budget. It reaches
budgets at which nothing that recomputes only once can exist.

Cost: log L schedules, each as long as it has steps.
"""

from __future__ import annotations

from graphs.graph import Graph
from solver.blocks import Blocks, cut
from solver.fastest import Fastest
from solver.playback import Playback
from solver.proposal import Proposal
from solver.rematerialise import baseline
from solver.revolve import schedule as reversal
from solver.schedule import Schedule

MAX_BLOCKS = 100


def revolve(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """The reversal with the most snapshots that fit. No randomness."""
    with Fastest(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        blocks = cut(graph, max_blocks=MAX_BLOCKS)
        fits, overflows = 0, blocks.n_blocks + 1
        while overflows - fits > 1 and not search.time_is_up():
            n_snapshots = (fits + overflows) // 2
            if search.fits(play_reversal(graph, blocks, n_snapshots=n_snapshots)):
                fits = n_snapshots
            else:
                overflows = n_snapshots
        return search.proposal()


def play_reversal(graph: Graph, blocks: Blocks, *, n_snapshots: int) -> Schedule:
    """Play the reversal of the blocks: step i of the chain problem is block i + 1."""
    playback = Playback(graph, blocks)
    snapshots: set[int] = set()
    for kind, start, stop in reversal(n_steps=blocks.n_blocks, n_snapshots=n_snapshots):
        if kind == "store":
            snapshots.add(start)
        elif kind == "drop":
            snapshots.remove(start)
        elif kind == "advance":
            for step in range(start, stop):
                playback.forward_keeping_output(step + 1, drop_input=step not in snapshots)
        elif kind == "reverse":
            playback.forward_keeping_all(start)
            if start == blocks.n_blocks:  # the caller's loss, between forward and backward pass
                playback.backward(start + 1)
            playback.backward(start)
    return playback.schedule()
