"""Spend minutes on a sharper bound, if a schedule is known and the bound is far below it.

Several cuts (`solver.methods.auto.several_cuts`) stop at programs of a few seconds. Here larger
ones are solved for the bound alone, as integer programs with the rows of windows between all of
their positions (`solver.bound.windows`). Near the minimum budget of a network with long skips that
proves far more than either alone: the LP of windows lets half a recomputation serve twice, and
several cuts without windows count once what is recomputed before two positions. For the U-Net of
the examples at a tenth of its range, several cuts prove 26.3 %, and the program of both 30.6, which
is what the schedule loses.

Positions are added as in `several_cuts`: those at which the schedule of the solution exceeds the
budget. No position gets an allowance, so each round is a proof. A solution whose schedule fits is
about as good as the bound, and that schedule is proposed.

SCIP solves the programs if it is installed (`solver.bound.scip`), HiGHS otherwise.

Skipped on large steps for which nested reversals prove far more than cuts. Of no use for deep
networks of equal blocks, where the LP of all positions proves more than this program of a dozen,
and for graphs of thousands of nodes, whose programs are too large.
"""

from __future__ import annotations

import math
from functools import partial

from graphs.graph import Graph
from solver.bound import (
    Cuts,
    Milp,
    StorageGraph,
    WindowCuts,
    add_rounded_byte_rows,
    has_scip,
    large_units_only,
    solve_by_scip,
)
from solver.chain import split_into_blocks
from solver.methods.auto.nested_reversals import prove_by_reversals
from solver.methods.auto.search import Search
from solver.methods.auto.stages import single_cut
from solver.methods.proposal import Proposal

WORTH_GAP = 0.01
"""A gap up to this share of the baseline's time is not worth a minute."""
N_NEW_POSITIONS, LEAST_DISTANCE = 2, 2
"""Maximum positions that one round adds, and the distance that they must exceed. With larger values
the programs grow faster than what they prove.
"""
MAX_COLUMNS, MAX_COLUMNS_BY_SCIP = 5_000, 20_000
"""Maximum columns of one program, which may then take minutes."""
NODES_TIMES_COLUMNS, NODES_TIMES_COLUMNS_BY_SCIP = 300_000, 2_000_000
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
    """A sharper bound, at least `proven_s`, and a schedule if one of its solutions fits.

    known_s: time of a known schedule for this budget. The search ends when the bound is within
        WORTH_GAP of it.
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
        if not (search.is_nested or search.is_done):
            single_cut(search)
            _add_positions(search)
    return search.proposal()


def _add_positions(search: Search) -> None:
    """Solve programs with more and more positions, each of which may sharpen the bound."""
    if not search.binding.ranked_positions:
        return
    folded, coarse = search.folded, large_units_only(search.folded, search.budget_bytes)
    small = [u for u in range(folded.n_units) if folded.uses[u] and not coarse.uses[u]]
    positions = {search.binding.ranked_positions[0][0]}
    proven_before = 0.0
    while not search.is_done:
        cuts = _solve(search, coarse, sorted(positions))
        if cuts is None:
            break
        search.prove(cuts.lost_share)
        # With more positions less is proven only if the branch-and-bound nodes run out.
        if cuts.kept is None or cuts.lost_share < proven_before - GAP:
            break
        proven_before = cuts.lost_share
        kept = {
            p: held.union(u for u in small if folded.maker[u] < p <= folded.uses[u][-1])
            for p, held in cuts.kept.items()
        }
        found = search.offer_cuts(kept)
        if found is None:
            break
        new = found.overflowing_positions(
            search.budget_bytes,
            n_most=N_NEW_POSITIONS,
            distance=LEAST_DISTANCE,
            excluded={*positions, folded.n_nodes},
        )
        if not new:
            break
        positions.update(new)


def _solve(search: Search, coarse: StorageGraph, positions: list[int]) -> Cuts | None:
    """Solve the program at these positions; None: it is too large. Raises OutOfTimeError."""
    program = WindowCuts(
        coarse,
        positions=positions,
        marks=positions,
        budget_bytes=search.budget_bytes,
        deadline=search.deadline,
    )
    n_columns, by_scip = program.n_columns, has_scip()
    if n_columns > (MAX_COLUMNS_BY_SCIP if by_scip else MAX_COLUMNS):
        return None
    add_rounded_byte_rows(program)
    n_nodes = (NODES_TIMES_COLUMNS_BY_SCIP if by_scip else NODES_TIMES_COLUMNS) // max(1, n_columns)
    solve = solve_by_scip if by_scip else partial(Milp.solve, as_milp=True)
    answer = solve(program.program, gap=GAP, node_limit=max(1, n_nodes), deadline=search.deadline)
    search.timed_out = search.timed_out or answer.timed_out
    return program.to_cuts(answer)
