"""Share a rank's budget among its pipeline stages (`schedule="interleaved"`) at the least time.

    solutions = [solve(stage, micro_batch, budget="16GB", pipeline=place) for stage, place in ...]
    plans = share_rank_budget(solutions)     # plans.peak_bytes <= 16 GB; plans.gap

A stage that is planned alone assumes that the rank's other stages are like it. Here the stages are
planned together, so that one may save more for backward while another saves less. The gap proves
how far the plans can be from the least time (`rank_search`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from graphs.pipeline import PipelineError
from solver.plan_analysis.planned_stages import micro_batch_s, optimizer_s
from solver.plan_analysis.rank_peak import check_rank, in_pipeline_order, rank_peak_bytes
from solver.plan_analysis.rank_search import RankSearch, StagePlan
from solver.schedule import OPTIMAL_GAP, Solution, Status
from solver.sizes_deadlines_progress import Deadline, format_percent, format_size


@dataclass(frozen=True)
class RankPlans(Sequence[Solution]):
    """Plans of all stages of a rank that fit its budget together; a sequence of Solutions.

    solutions: in the order in which the stages were given. The budget of each is what the rank
        would need if all its stages were like this one; its gap and status refer to that budget.
    budget_bytes: what the rank's stages may take together, without the reserve.
    lower_bound_s: no plans of these stages that fit together are faster.
    timed_out: the time limit or Ctrl-C ended the search: more time might find better plans.

    Seconds are those of the forward and backward pass of one micro-batch in all stages of the rank.
    """

    solutions: tuple[Solution, ...]
    budget_bytes: int
    lower_bound_s: float
    timed_out: bool = False

    @overload
    def __getitem__(self, index: int) -> Solution: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Solution]: ...
    def __getitem__(self, index: int | slice) -> Solution | Sequence[Solution]:
        return self.solutions[index]

    def __len__(self) -> int:
        return len(self.solutions)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the rank holds at once."""
        return rank_peak_bytes(self.solutions)

    @property
    def time_s(self) -> float:
        """Seconds with these plans."""
        return math.fsum(micro_batch_s(solution) or 0.0 for solution in self.solutions)

    @property
    def baseline_s(self) -> float:
        """Seconds without plans."""
        found = (s.baseline.time_s - optimizer_s(s.plain) for s in self.solutions)
        return math.fsum(found)

    @property
    def overhead(self) -> float:
        """Extra time as a share of the time without plans."""
        return self.time_s / (self.baseline_s or 1.0) - 1.0

    @property
    def gap(self) -> float:
        """Time above the lower bound, as a share of the time without plans."""
        return max(0.0, self.time_s - self.lower_bound_s) / (self.baseline_s or 1.0)

    @property
    def status(self) -> Status:
        return "optimal" if self.gap <= OPTIMAL_GAP else "feasible"

    def __repr__(self) -> str:
        """One line: the request, the plans found, and the proven gap."""
        request_text = f"{len(self)} stages, {self.status}, budget {format_size(self.budget_bytes)}"
        return (
            f"RankPlans({request_text}: peak {format_size(self.peak_bytes)}, overhead "
            f"{format_percent(self.overhead)}, proven within {format_percent(self.gap)})"
        )


def share_rank_budget(solutions: Sequence[Solution]) -> RankPlans:
    """Find the fastest plans of a rank's stages that fit its budget together.

    solutions: one for each stage of the rank, all made with the same budget; some may be without a
        plan. The longest time limit of their requests limits the search.

    Raises PipelineError if the stages are not exactly those of one rank, if their budgets differ,
    and if no plans are found that fit together.
    """
    place = check_rank(solutions)
    budgets = {solution.request.available_bytes for solution in solutions}
    if len(budgets) > 1:
        words = ", ".join(map(format_size, sorted(budgets)))
        raise PipelineError(f"the stages of a rank share one budget, but were solved for {words}")
    (budget_bytes,) = budgets
    if len(solutions) == 1 and (only := solutions[0]).simulation is not None:
        bound_s = only.lower_bound_s - optimizer_s(only.graph)
        return RankPlans((only,), budget_bytes, bound_s, only.timed_out)
    given = in_pipeline_order(solutions)
    deadline = Deadline.after(max(solution.request.time_limit_s for solution in solutions))
    search = RankSearch(place, given, budget_bytes=budget_bytes, deadline=deadline)
    search.run()
    if search.best is None:
        proven = " (proven)" if math.isinf(search.lower_bound_s) else ""
        raise PipelineError(
            f"no plans of this rank's stages fit {budget_bytes} bytes together{proven}; the "
            f"smallest peak found is {search.least_peak_bytes} bytes"
        )
    plans = {id(solution): plan for solution, plan in zip(given, search.best, strict=True)}
    found = tuple(_with_plan(solution, plans[id(solution)]) for solution in solutions)
    return RankPlans(found, budget_bytes, search.lower_bound_s, search.timed_out)


def _with_plan(given: Solution, plan: StagePlan) -> Solution:
    """The stage's solution with this plan. Its budget is what a rank of only such stages takes."""
    if plan.graph is given.graph and plan.schedule == given.schedule:
        return given
    peak_bytes, request = plan.simulation.peak_bytes, given.request
    # A bound proven for a larger budget also holds for a smaller one.
    is_smaller = peak_bytes <= request.available_bytes
    least_s = min(graph.baseline_time_s for graph in given.step.planned)
    return dataclasses.replace(
        given,
        graph=plan.graph,
        schedule=plan.schedule,
        simulation=plan.simulation,
        request=dataclasses.replace(request, budget_bytes=peak_bytes + request.reserve_bytes),
        lower_bound_s=given.lower_bound_s if is_smaller else least_s,
        obstacle=None,
    ).with_bound(least_s)
