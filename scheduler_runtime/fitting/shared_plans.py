"""Plans that copies of a fitted module share: first-order meta-learning copies it in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from graphs.model_calls import Call
from scheduler_runtime.execute import BoundProgram, StepProgram
from scheduler_runtime.fitting.options import Fitted, Options
from scheduler_runtime.planned import Plan, PlannedPass

N_KEPT = 8
"""The most plans that are kept for copies."""


@dataclass(frozen=True)
class SharedPlan:
    """A plan that copies of its module may run.

    kind: the kind of call that it is for.
    program: without what it needs to run a step again, which belongs to one module.
    returned_bytes: bytes of the outputs that the program returns.
    """

    kind: Any
    program: BoundProgram
    fitted: Fitted
    returned_bytes: int

    @property
    def planned_pass(self) -> PlannedPass:
        return PlannedPass.of_solution(self.fitted.solution)


class SharedPlans:
    """The plans of all copies of a fitted module, which hold this same object.

    A copy runs a plan of another copy only if it would be traced alike: the kind of call is equal
    (class, attributes, forms of parameters and buffers, settings), values that `forward` reads are
    those of the plan, and the program has no tensors of the other copy (from plain attributes) and
    no parts that are not traced. The plans of the original are not shared, since they count its
    optimizer. With a budget that depends on the free memory, or copies to the host, each copy has
    plans of its own.
    """

    def __init__(self) -> None:
        self._plans: list[SharedPlan] = []

    def __deepcopy__(self, _memo: object) -> SharedPlans:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPlans, ()  # in another process: no plans

    def add(
        self,
        kind: Any,
        program: BoundProgram,
        fitted: Fitted,
        options: Options,
        *,
        returned_bytes: int,
    ) -> None:
        """Let other copies run this plan, if they can."""
        captured, plan = program.captured, Plan.of(fitted.solution)
        is_of_one_module = captured.held or captured.filled or captured.opaque
        is_placed = fitted.solution.request.places is not None or plan.state_buckets
        if is_of_one_module or is_placed or options.budget == "auto":
            return
        self._plans = [each for each in self._plans if each.kind != kind][1 - N_KEPT :]
        self._plans.append(SharedPlan(kind, program.with_others(None), fitted, returned_bytes))

    def find(self, kind: Any, model: nn.Module, call: Call) -> SharedPlan | None:
        """The plan of another copy for this call, if there is one."""
        found = (each for each in self._plans if each.kind == kind)
        return next((each for each in found if each.program.fits(model, call)), None)

    def drop(self, program: StepProgram) -> None:
        """Forget the plan of this program."""
        if isinstance(program, BoundProgram):
            code = program.program
            self._plans = [each for each in self._plans if each.program.program is not code]
