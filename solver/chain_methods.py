"""`dp` and `revolve` on a graph: solve the chain of its blocks, play the answer, have it judged.

The chain is a model of the graph (`block_chain`), so its budget is not the graph's: both methods
bisect for the most generous chain problem whose answer the judge lets pass.

dp: Olivier Beaumont, Lionel Eyraud-Dubois, Julien Herrmann, Alexis Joly, Alena Shilova: Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory,
arXiv:1911.13214 (2019), known as rotor. Optimal for a chain of unequal blocks among persistent
schedules, where a block is kept whole, by its input, or not at all. On a graph it falls short where
blocks are coarse, since it cannot keep the expensive half of one, and where the model is off: it
charges a block that runs again for ops at its end that do not run. Therefore each of its answers is
also played keeping every input that the forward pass goes through, and the schedule of `sqrt`
is judged as well; so it is never worse than that or `every_block`.

revolve: Andreas Griewank, Andrea Walther: Algorithm 799: revolve, ACM TOMS 26 (2000). Fewest
forward steps for a chain of equal steps and a number of snapshots. On a graph it falls short where
steps are unequal, and where memory would allow more than inputs to be kept: it runs every block but
the last again. It reaches the smallest budgets on deep chains, where all blocks are stepped over
one by one; both these and at most REVOLVE_MAX_BLOCKS coarser ones are tried.

Cost: dp some dozen chain problems of at most DP_MAX_BLOCKS blocks, revolve log L; each answer is
played and judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median_low

from graphs.graph import Graph
from solver.block_chain import constant_bytes, to_chain
from solver.blocks import Blocks, cut
from solver.chain import (
    Backward,
    Chain,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
)
from solver.clock import NEVER, Deadline
from solver.dp import solve_chain
from solver.fastest import Fastest
from solver.playback import Playback
from solver.proposal import Proposal
from solver.rematerialise import baseline
from solver.revolve import n_extra_steps
from solver.revolve import schedule as reversal
from solver.schedule import Schedule
from solver.sqrt import sqrt

DP_MAX_BLOCKS = 64
REVOLVE_MAX_BLOCKS = 128
N_BISECTIONS = 8
N_SLOTS = 500
MAX_RUNS = 20
"""Of a block in a reversal: with few snapshots a long chain would run the first ones endlessly."""


def dp(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """The optimal persistent schedule of the chain, for the best chain budget. No randomness."""
    with Fastest(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        search.deadline.check()
        plain = sqrt(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s / 4, seed=seed)
        if plain.schedule:
            search.fits(plain.schedule)
        blocks = cut(graph, max_blocks=DP_MAX_BLOCKS)
        guess_bytes = budget_bytes - constant_bytes(graph, blocks)
        if blocks.n_blocks and guess_bytes > 0:
            chains = _Chains(graph, blocks, search)
            most_bytes = chains.raise_budget(0, 2 * guess_bytes, keep_inputs=False)
            chains.raise_budget(most_bytes // 2, most_bytes, keep_inputs=True)
    return search.proposal()


class _Chains:
    """The chain of a graph's blocks under one budget after another."""

    def __init__(self, graph: Graph, blocks: Blocks, search: Fastest) -> None:
        self._graph = graph
        self._blocks = blocks
        self._search = search
        self._chain = to_chain(graph, blocks)

    def raise_budget(self, low: int, high: int, *, keep_inputs: bool) -> int:
        """By bisection, the largest chain budget up to `high` whose answer fits the graph."""
        tolerance = max(1, high // 2**N_BISECTIONS)
        while high - low > tolerance and not self._search.time_is_up():
            middle = (low + high) // 2
            solution = solve_chain(
                self._chain, budget_bytes=middle, n_slots=_n_slots(self._chain, middle)
            )
            if solution is None or self._fits(solution.ops, keep_inputs=keep_inputs):
                low = middle
            else:
                high = middle
        return high

    def _fits(self, ops: Iterable[ChainOp], *, keep_inputs: bool) -> bool:
        return self._search.fits(
            play_chain(
                self._graph,
                self._blocks,
                ops,
                keep_inputs=keep_inputs,
                deadline=self._search.deadline,
            )
        )


def _n_slots(chain: Chain, budget_bytes: int) -> int:
    """About 500 slots, such that the usual input is a whole number of them: rounding costs less."""
    sizes = [size for size in chain.input_bytes if size]
    if not sizes:
        return N_SLOTS
    usual = median_low(sizes)
    n_slots = budget_bytes * (N_SLOTS * usual // budget_bytes) // usual
    return n_slots or N_SLOTS


def play_chain(
    graph: Graph,
    blocks: Blocks,
    ops: Iterable[ChainOp],
    *,
    keep_inputs: bool,
    deadline: Deadline = NEVER,
) -> Schedule:
    """Play the operations of a chain's solution; `keep_inputs`: let go of no block's input.

    Raises OutOfTimeError.
    """
    playback = Playback(graph, blocks)
    for op in ops:
        deadline.check()
        match op:
            case ForwardKeepingOutput(block):
                playback.forward_keeping_output(block, drop_input=not keep_inputs)
            case ForwardKeepingInput(block):
                playback.forward_keeping_output(block, drop_input=False)
            case ForwardKeepingAll(block):
                playback.forward_keeping_all(block)
            case Backward(block):
                playback.backward(block)
    deadline.check()
    return playback.schedule()


def revolve(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """The reversal with the most snapshots that fit. No randomness."""
    with Fastest(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        coarse, fine = cut(graph, max_blocks=REVOLVE_MAX_BLOCKS), cut(graph)
        for blocks in (coarse, fine) if fine.n_blocks > coarse.n_blocks else (coarse,):
            fits, overflows = 0, blocks.n_blocks + 1
            while overflows - fits > 1 and not search.time_is_up():
                n_snapshots = (fits + overflows) // 2
                if _is_long(blocks, n_snapshots) or search.fits(
                    play_reversal(graph, blocks, n_snapshots=n_snapshots, deadline=search.deadline)
                ):
                    fits = n_snapshots
                else:
                    overflows = n_snapshots
    return search.proposal()


def reversals(graph: Graph, *, deadline: Deadline = NEVER) -> Iterator[Schedule]:
    """Reversals of all blocks with more and more snapshots: small peaks, the smallest ones first.

    Without those that run a block MAX_RUNS times and more on the average. Raises OutOfTimeError.
    """
    deadline.check()
    blocks = cut(graph)
    n_snapshots = 1
    while n_snapshots < blocks.n_blocks:
        if not _is_long(blocks, n_snapshots):
            yield play_reversal(graph, blocks, n_snapshots=n_snapshots, deadline=deadline)
        n_snapshots += 1 + n_snapshots // 2


def _is_long(blocks: Blocks, n_snapshots: int) -> bool:
    n_steps = blocks.n_blocks
    return n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots) > MAX_RUNS * n_steps


def play_reversal(
    graph: Graph, blocks: Blocks, *, n_snapshots: int, deadline: Deadline = NEVER
) -> Schedule:
    """Play the reversal of the blocks: step i of the chain problem is block i + 1.

    Raises OutOfTimeError.
    """
    playback = Playback(graph, blocks)
    snapshots: set[int] = set()
    for kind, start, stop in reversal(n_steps=blocks.n_blocks, n_snapshots=n_snapshots):
        deadline.check()
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
    deadline.check()
    return playback.schedule()
