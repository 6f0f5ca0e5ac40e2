"""The plans that `fit` has made for a module, and the messages about them."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_runtime.fitting.options import Fitted
from scheduler_runtime.fitting.pending_plans import NOTABLE_SHARE, PendingPlan
from scheduler_runtime.planned import Difference, plan_summary, warn_of_another_plan
from solver.methods import KnownPlan
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_both, format_size, tell


class PlanHistory:
    """The plans of one module.

    plans: all plans, oldest first.
    single_step_plans: the plans for a single step that ran again, while its first run held memory.
    """

    def __init__(self) -> None:
        self.plans: list[Fitted] = []
        self.single_step_plans: list[Fitted] = []
        self._given_remedies: set[str] = set()

    def solutions(self) -> list[Solution]:
        """The solutions of the plans that later steps may use."""
        return [each.solution for each in self.plans if each not in self.single_step_plans]

    def known(self, outdated: Iterable[PendingPlan]) -> list[KnownPlan]:
        """The plans that another search may start from. outdated: plans to leave out."""
        outdated_ids = {id(pending.fitted) for pending in outdated}
        plans = [each for each in self.plans if not each.reused and id(each) not in outdated_ids]
        return [KnownPlan.of(each.solution) for each in plans]

    def add(self, fitted: Fitted, *, instead_of: Fitted | None) -> None:
        if instead_of is None:
            self.plans.append(fitted)
        else:
            self.plans[self.plans.index(instead_of)] = fitted

    def update_figures(self, pending: PendingPlan, fitted: Fitted, why: str, *, title: str) -> None:
        """Replace the figures of a plan by those that its first step has shown.

        fitted: the plan with the new figures.
        why: the reason, for the message.
        title: name of the model.
        """
        at = next((n for n, each in enumerate(self.plans) if each is pending.fitted), None)
        if at is None:  # the plan was replaced already
            return
        before, now = (each.solution.baseline.peak_bytes for each in (pending.fitted, fitted))
        self.plans[at] = pending.fitted = fitted
        if abs(now - before) > NOTABLE_SHARE * before:
            planned = fitted.solution.simulation
            assert planned is not None
            tell(
                f"{title}: {why}, so the peak without a plan is {format_both(now)}, "
                f"not {format_size(before)}. The plan stays the same; its peak is "
                f"{format_size(planned.peak_bytes)}"
            )

    def tell(self, reason: Difference | None, *, full_limit_s: float) -> None:
        """Describe the last plan in one line, as a warning if a similar call was planned before.

        reason: how this call differs from earlier ones (None: it is the first of its step).
        full_limit_s: the time limit of a search; a first step may get only a share of it.
        """
        new = self.plans[-1]
        line = plan_summary(new.solution, is_reused=new.reused, took_s=new.took_s)
        if new.solution.timed_out and new.solution.request.time_limit_s < full_limit_s:
            line += (
                f" (a first step gets only a part of time_limit_s={full_limit_s:g}: the next one "
                "is planned again, without haste, if the loss takes less than is reserved)"
            )
        if reason is None:
            tell(line)
            return
        all_took_s = sum(each.took_s for each in self.plans)
        warn_of_another_plan(
            line,
            reason,
            n_plans=len(self.plans),
            given=self._given_remedies,
            all_took_s=all_took_s,
        )
