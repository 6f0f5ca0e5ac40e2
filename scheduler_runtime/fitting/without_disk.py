"""Plan for a step whose disk fails, so that it can run again without the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from graphs.model_calls import device_of
from scheduler_runtime.execute import BoundProgram, Shortage, restart_copy_bytes
from scheduler_runtime.fitting.step_to_plan import StepToPlan
from scheduler_runtime.planned import Ranks
from solver.schedule import Solution
from solver.sizes_deadlines_progress import telling

logger = logging.getLogger(__name__)


class WithoutDisk:
    """Finds a program without the disk. It plans when it is first called, and reuses the plan for
    later steps whose disk fails, if it fits these.

    to_plan: the step as it was planned with the disk.
    solve: step to plan -> the solver's answer.
    build_program: (step to plan, solution) -> the program that runs the solution.
    """

    def __init__(
        self,
        model: nn.Module,
        to_plan: StepToPlan,
        *,
        solve: Callable[[StepToPlan], Solution],
        build_program: Callable[[StepToPlan, Solution], BoundProgram],
    ) -> None:
        self._step_to_plan, self._title = to_plan, type(model).__name__
        # while the step runs again, tensors that forward changes are copied once more
        self._kept_bytes = restart_copy_bytes(to_plan.step.captured, device_of(model), always=True)
        self._solve, self._build_program = solve, build_program
        self._reusable_plan: tuple[int, BoundProgram] | None = None

    def __call__(self, _than: object, shortage: Shortage) -> BoundProgram:
        """A program for a step whose disk has failed. Raises the error if there is none."""
        to_plan = self._step_to_plan.without_disk(shortage.held_bytes + self._kept_bytes)
        if self._reusable_plan is None or self._reusable_plan[0] > to_plan.request.available_bytes:
            self._reusable_plan = self._plan_step(to_plan, shortage.error)
        words = self._title, shortage.error, shortage.where
        logger.warning("%s: %s (in the %s). The step runs again without the disk", *words)
        return self._reusable_plan[1]

    def _plan_step(self, to_plan: StepToPlan, error: Exception) -> tuple[int, BoundProgram]:
        """Plan the step without the disk; returns the bytes of its peak and the program."""
        with telling(f"planning {self._title} without the disk...", in_lines=True):
            solution = self._solve(to_plan)
        if solution.simulation is None:
            error.add_note("No plan without the disk was found, so the step cannot run again.")
            raise error
        return solution.simulation.peak_bytes, self._build_program(to_plan, solution)


def without_disk(
    model: nn.Module,
    to_plan: StepToPlan,
    solution: Solution,
    *,
    solve: Callable[[StepToPlan], Solution],
    build_program: Callable[[StepToPlan, Solution], BoundProgram],
) -> WithoutDisk | None:
    """Make a WithoutDisk for the step of this solution.

    None: the step needs no disk, or cannot run again. With a loss outside of the model, it cannot,
    since it would have to hold the gradients that arrive; with several ranks, because the other
    ranks would not join its collectives."""
    spills = solution.simulation is not None and solution.simulation.disk_peak_bytes > 0
    if not spills or to_plan.losses or Ranks.of(model) is not None:
        return None
    return WithoutDisk(model, to_plan, solve=solve, build_program=build_program)
