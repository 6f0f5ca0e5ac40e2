"""One budget for all stages of a rank (`schedule="interleaved"`), divided at the least time.

    solutions = [solve(stage, micro_batch, budget="16GB", pipeline=place) for stage, place in ...]
    solutions = share_rank_budget(solutions)     # rank_peak_bytes(solutions) <= 16 GB

A stage that is planned by itself takes the rank's other stages to be like it. Here each stage is
planned for several budgets, and of all combinations of these plans, and those that were given, that
fit together by `rank_peak_bytes`, the one that takes the least time is chosen. So a stage may save
more than it could if the others were like it, where one of them saves less.

Optimal for: the plans that are compared, if there are at most MOST_COMBINATIONS of them.
Cost: `n_budgets` quick plans of each stage; then a sum for each combination.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from graphs.pipeline import PipelineError
from solver.plan_analysis.pareto import sweep
from solver.plan_analysis.planned_stages import micro_batch_s
from solver.plan_analysis.rank_peak import check_rank, rank_peak_bytes
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_size

MOST_COMBINATIONS = 20_000


def share_rank_budget(
    solutions: Sequence[Solution], *, n_budgets: int = 10
) -> tuple[Solution, ...]:
    """Plans of the same stages that fit the rank's budget together, at the least time found.

    solutions: of all stages of one rank, made with the same budget, whether each has a plan or not.
        The time limit of their requests is that of each plan.
    n_budgets: how many each stage is planned for. A stage's budget, in the plans that are returned,
        is what the rank would take if all of its stages were like this one.

    Raises PipelineError for stages of several ranks, a stage too few, budgets that differ, and
    where no combination of plans fits.
    """
    check_rank(solutions)
    budgets = {solution.request.available_bytes for solution in solutions}
    if len(budgets) > 1:
        words = ", ".join(map(format_size, sorted(budgets)))
        raise PipelineError(f"the stages of a rank share one budget, but were solved for {words}")
    (budget_bytes,) = budgets
    n_each = max(2, min(n_budgets, math.floor(MOST_COMBINATIONS ** (1 / len(solutions)))))
    plans = [_plans(solution, n_each) for solution in solutions]
    found: tuple[Solution, ...] | None = None
    least_bytes: int | None = None
    found_s = math.inf
    for combination in itertools.product(*plans):
        time_s = math.fsum(micro_batch_s(plan) or 0.0 for plan in combination)
        if time_s >= found_s and found is not None:
            continue
        peak_bytes = rank_peak_bytes(combination)
        least_bytes = peak_bytes if least_bytes is None else min(least_bytes, peak_bytes)
        if peak_bytes <= budget_bytes:
            found, found_s = combination, time_s
    if found is None:
        least = "" if least_bytes is None else f"; the smallest peak found is {least_bytes} bytes"
        raise PipelineError(
            f"no plans of this rank's stages fit {budget_bytes} bytes together{least}"
        )
    return found


def _plans(solution: Solution, n_budgets: int) -> list[Solution]:
    """Plans of one stage, for budgets from the least to that of the step without recomputation."""
    like = dataclasses.replace(solution.request, reserve_bytes=0)
    curve = sweep(
        solution.variants or solution.graph,
        n_budgets=n_budgets,
        methods=(solution.request.method,),
        like=like,
        quick=True,
    )
    return [each for each in (solution, *curve.points) if each.simulation is not None]
