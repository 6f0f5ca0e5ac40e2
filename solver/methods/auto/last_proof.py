"""Minutes for a sharper proof, where a schedule is known and the bound is far below.

Several cuts (`solver.methods.auto.several_cuts`) stop at programs of a few seconds. Here they go on
for the sake of the bound, with the rows of windows between all of their positions
(`solver.bound.windows`) as an integer program. Near the least budget of a net with long skips that
proves far more than either: the windows' linear program lets half a recomputation serve twice, and
several cuts without windows let what is recomputed before two positions count once. The U-Net of
the examples at a tenth of its range: linear program 25.7 %, several cuts 26.5, both 28.6, and the
schedule loses 29.6.

Positions join as they do there: those at which the replay of the solution overflows. No bytes are
taken from a position for what its recomputation takes, so each round is a proof. A solution that
does not overflow is about as good as the bound, and is the schedule that is proposed.

Not tried on large steps of which nested reversals prove far more than cuts. Of no use for deep nets
of equal blocks, where the linear program of all positions proves more than this of a dozen, and for
graphs of thousands of nodes, whose programs are too large.
"""

from __future__ import annotations

import math

from graphs.graph import Graph
from solver.bound import Cuts, StorageGraph, WindowCuts, large_units_only, round_bytes
from solver.chain import split_into_blocks
from solver.methods.auto.nested_reversals import prove_by_reversals
from solver.methods.auto.search import Search
from solver.methods.auto.stages import single_cut
from solver.methods.proposal import Proposal

WORTH_GAP = 0.01
"""Of the baseline's time: a gap that is no larger is not worth a minute."""
N_NEW_POSITIONS, LEAST_DISTANCE = 2, 2
"""Positions that one round adds at most, and nodes between them: with more of them, further apart,
the programs grow faster than what they prove.
"""
MAX_COLUMNS = 5_000
"""Of one program, which takes half a minute then."""
NODES_TIMES_COLUMNS = 300_000
"""Branch-and-bound nodes times columns of one program."""
GAP = 3e-4
"""A program is solved to within this share of the baseline's time."""


def prove_more(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    proven_s: float = 0.0,
    known_s: float = math.inf,
) -> Proposal:
    """A sharper bound, of at least `proven_s`; with a schedule where one of its solutions fits.

    known_s: of a schedule for this budget. Ends within WORTH_GAP below it.
    """
    baseline_s = graph.baseline_time_s or 1.0
    search = Search(
        StorageGraph.of(graph),
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s,
        worth_below_share=known_s / baseline_s - 1.0 - WORTH_GAP,
    )
    with search:
        search.prove(proven_s / baseline_s - 1.0)
        prove_by_reversals(search, split_into_blocks(graph))
        if not (search.is_nested or search.done):
            single_cut(search)
            _add_positions(search)
    return search.proposal()


def _add_positions(search: Search) -> None:
    """Prove more, round by round."""
    if not search.binding.ranked:
        return
    folded, coarse = search.folded, large_units_only(search.folded, search.budget_bytes)
    small = [u for u in range(folded.n_units) if folded.uses[u] and not coarse.uses[u]]
    positions = {search.binding.ranked[0][0]}
    proven_before = 0.0
    while not search.done:
        cuts = _solve(search, coarse, sorted(positions))
        if cuts is None:
            break
        search.prove(cuts.lost_share)
        # With more positions less is proven only where the branch-and-bound nodes run out.
        if cuts.kept is None or cuts.lost_share < proven_before - GAP:
            break
        proven_before = cuts.lost_share
        kept = {
            p: held.union(u for u in small if folded.maker[u] < p <= folded.uses[u][-1])
            for p, held in zip(cuts.positions, cuts.kept, strict=True)
        }
        found = search.offer_cuts(kept)
        if found is None:
            break
        new = found.overflowing(
            search.budget_bytes,
            n_most=N_NEW_POSITIONS,
            distance=LEAST_DISTANCE,
            but={*positions, folded.n_nodes},
        )
        if not new:
            break
        positions.update(new)


def _solve(search: Search, coarse: StorageGraph, positions: list[int]) -> Cuts | None:
    """None: the program is too large. Raises OutOfTimeError."""
    program = WindowCuts(
        coarse,
        positions=positions,
        marks=positions,
        budget_bytes=search.budget_bytes,
        deadline=search.deadline,
    )
    if program.n_columns > MAX_COLUMNS:
        return None
    round_bytes(program)
    answer = program.program.solve(
        whole=True,
        gap=GAP,
        node_limit=max(1, NODES_TIMES_COLUMNS // max(1, program.n_columns)),
        deadline=search.deadline,
    )
    search.timed_out = search.timed_out or answer.timed_out
    return program.read(answer)
