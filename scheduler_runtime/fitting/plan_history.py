"""The plans that `fit` has made for a module, and what its user is told of each."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_runtime.fitting.first_planned_step import Made
from scheduler_runtime.fitting.options import Fitted
from scheduler_runtime.planned import Difference, told, warn_of_another
from solver.methods import KnownPlan
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_both, format_size, format_time, tell

SHARE_TOLD = 0.01
"""A peak without a plan that turns out to be another by more than this share is told anew."""


class PlanHistory:
    """plans: oldest first.

    of_one_step: those of a step that ran again, beside what its first pass held.
    """

    def __init__(self) -> None:
        self.plans: list[Fitted] = []
        self.of_one_step: list[Fitted] = []
        self._said: set[str] = set()

    def solutions(self) -> list[Solution]:
        """Of the plans that later steps may use."""
        return [each.solution for each in self.plans if each not in self.of_one_step]

    def known(self, outdated: Iterable[Made]) -> list[KnownPlan]:
        """Those that another search may start from."""
        old = {id(made.fitted) for made in outdated}
        plans = [each for each in self.plans if not each.reused and id(each) not in old]
        return [KnownPlan.of(each.solution) for each in plans]

    def add(self, fitted: Fitted, *, instead_of: Fitted | None) -> None:
        if instead_of is None:
            self.plans.append(fitted)
        else:
            self.plans[self.plans.index(instead_of)] = fitted

    def show(self, made: Made, fitted: Fitted, why: str, *, title: str) -> None:
        """The figures of a plan, as its first step has shown them."""
        at = next((n for n, each in enumerate(self.plans) if each is made.fitted), None)
        if at is None:  # another was made in its place
            return
        before, now = (each.solution.baseline.peak_bytes for each in (made.fitted, fitted))
        self.plans[at] = made.fitted = fitted
        if abs(now - before) > SHARE_TOLD * before:
            tell(
                f"{title}: {why}, so the peak without a plan is {format_both(now)}, "
                f"not {format_size(before)}; the plan stays"
            )

    def tell(self, reason: Difference | None, *, full_limit_s: float) -> None:
        """The last plan in a line: a warning where a call like it was planned before."""
        new = self.plans[-1]
        line = told(new.solution, is_reused=new.reused, took_s=new.took_s)
        if new.solution.timed_out and new.solution.request.time_limit_s < full_limit_s:
            line += (
                f" (the first step's share of {format_time(full_limit_s)}: it is planned anew if "
                "the loss takes less than is reserved)"
            )
        if reason is None:
            tell(line)
            return
        all_took_s = sum(each.took_s for each in self.plans)
        warn_of_another(
            line, reason, n_plans=len(self.plans), said=self._said, all_took_s=all_took_s
        )
