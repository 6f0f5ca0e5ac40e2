"""Plans of different peaks for one kind of call, from which steps choose when memory is short.

    ladder = Ladder(...)
    ladder.run(model, call)     # with the fastest plan within the present limit

Each plan is made when it is first needed. The step is traced only once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.model_calls import Call
from scheduler_runtime.execute import BoundProgram, Shortage, StepProgram
from scheduler_runtime.fitting.options import nothing_fits
from scheduler_runtime.fitting.pressure import SHARE_KEPT, SHARE_OF_RESERVE, Pressure
from scheduler_runtime.fitting.step_to_plan import StepToPlan
from scheduler_runtime.surroundings import n_out_of_memory, room_bytes
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    format_share,
    format_size,
    format_size_up,
    now_s,
    telling,
)

logger = logging.getLogger(__name__)

NOT_ON_RANKS = (
    "fit: on_pressure='replan' runs a step again on the rank that is short of memory, and its "
    "collectives would wait for the other ranks: leave it out with tensor parallelism"
)


@dataclass(frozen=True)
class Rung:
    """A plan and its program."""

    solution: Solution
    program: BoundProgram

    @property
    def peak_bytes(self) -> int:
        assert self.solution.simulation is not None
        return self.solution.simulation.peak_bytes

    @property
    def resident_bytes(self) -> int:
        return self.solution.graph.resident_bytes

    @property
    def growth_bytes(self) -> int:
        """Bytes that a step takes besides the resident ones."""
        return self.peak_bytes - self.resident_bytes

    @property
    def tighter_peak_bytes(self) -> int:
        """The peak that a clearly tighter plan may have."""
        return self.resident_bytes + int(SHARE_KEPT * self.growth_bytes)

    def __str__(self) -> str:
        slower = format_share(self.solution.overhead)
        return f"a plan of {format_size_up(self.peak_bytes)} ({slower} time)"


Planner = Callable[["Ladder", int], Rung | Solution]
"""Makes a plan within this many bytes; returns the solver's answer if there is none."""


class Ladder:
    """The plans of one kind of call; as a `StepProgram`, it runs the one that fits at the moment.

    make_rung: makes a plan within given bytes.
    pressure: the limit, shared by all ladders of the model.
    title: name of the model.
    available_bytes: the budget after the reserve.
    reserve_bytes: the reserve.
    """

    def __init__(
        self,
        make_rung: Planner,
        pressure: Pressure,
        *,
        title: str,
        device: torch.device,
        available_bytes: int,
        reserve_bytes: int,
    ) -> None:
        self._make_rung, self.pressure = make_rung, pressure
        self._title, self._device = title, device
        self._available_bytes, self._reserve_bytes = available_bytes, reserve_bytes
        self._rungs: list[Rung] = []
        self._full_rung: Rung | None = None
        self._has_tightest = False

    def fits(self, model: nn.Module, call: Call) -> bool:
        """Whether the plans are for this call (`StepProgram.fits`)."""
        return self._rungs[0].program.fits(model, call)

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run the forward pass with the fastest plan for which there is memory."""
        may_rise = self.pressure.begin_step()
        rung = self._current_rung()
        if self.pressure.has_new_errors(n_out_of_memory(self._device)):
            rung = self._tighten_after_error_outside(rung)
        elif may_rise:
            rung = self._faster_rung_if_room(rung)
        return self._rung_for_free_memory(rung).program.run(model, call)

    @property
    def is_empty(self) -> bool:
        """Whether no plan was made yet."""
        return not self._rungs

    def program(self) -> BoundProgram:
        """The program of the fastest plan within the limit."""
        return self._current_rung().program

    def tighter(self, than: object, shortage: Shortage) -> BoundProgram:
        """A tighter program to run a failed step again with; also lowers the limit for later steps.

        than: the program that has failed.
        shortage: how it has failed.

        Raises the original error if there is no plan with a smaller peak.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        failed = next((rung for rung in self._rungs if rung.program is than), None)
        if failed is None:  # a program for one step whose disk has failed: it has no tighter ones
            raise shortage.error
        # clearly less than the plan that has failed, and no more than is free
        limit_bytes = failed.tighter_peak_bytes
        room = room_bytes(self._device)
        if room is not None:
            limit_bytes = min(limit_bytes, failed.resident_bytes + room - self._reserve_bytes)
        self.pressure.has_new_errors(n_out_of_memory(self._device))
        self.pressure.lower_limit(limit_bytes)
        rung = self._rung_within(limit_bytes - shortage.held_bytes)
        if rung is None or rung.peak_bytes >= failed.peak_bytes:
            shortage.error.add_note(
                f"{self._title} ran with {failed}, and no tighter one is known: "
                'fit(on_pressure="replan") cannot run the step in less memory.'
            )
            raise shortage.error
        logger.warning(
            "%s: out of memory in the %s with %s; it runs again with %s",
            *(self._title, shortage.where, failed, rung),
        )
        return rung.program

    def _current_rung(self) -> Rung:
        """The fastest plan within the limit; if there is none, the tightest."""
        limit_bytes = self.pressure.limit_bytes
        rung = self._full_budget_rung() if limit_bytes is None else self._rung_within(limit_bytes)
        return rung or self._full_budget_rung()

    def _full_budget_rung(self) -> Rung:
        """The plan for the whole budget. Raises FitError if nothing fits."""
        if self._full_rung is None:
            found = self._make_rung(self, self._available_bytes)
            if not isinstance(found, Rung):
                raise nothing_fits(self._title, found)
            self._full_rung = found
            self._rungs.append(found)
        return self._full_rung

    def _rung_within(self, limit_bytes: int) -> Rung | None:
        """The fastest known plan within these bytes, else a new one, else the tightest known one.

        None: there are no plans.
        """
        found = [rung for rung in self._rungs if rung.peak_bytes <= limit_bytes]
        if found:
            return min(found, key=lambda rung: rung.solution.overhead or 0.0)
        if not self._has_tightest:
            answer = self._make_rung(self, limit_bytes)
            self._has_tightest = not isinstance(answer, Rung)
            new = answer if isinstance(answer, Rung) else self._least_budget_rung(answer)
            if new is not None:
                self._rungs.append(new)
        return min(self._rungs, key=lambda rung: rung.peak_bytes, default=None)

    def _least_budget_rung(self, answer: Solution) -> Rung | None:
        """A plan for the least possible budget; None: known plans take no more than that.

        answer: of the search that found no plan, with the minimum budget.
        """
        budget_bytes = answer.minimum_budget_bytes
        if budget_bytes is None:
            return None
        least_bytes = budget_bytes - self._reserve_bytes
        if least_bytes >= min((r.peak_bytes for r in self._rungs), default=self._available_bytes):
            return None
        found = self._make_rung(self, least_bytes)
        return found if isinstance(found, Rung) else None

    def _faster_rung_if_room(self, rung: Rung) -> Rung:
        """The next faster plan, if there is room for it or that is not known; also raises the
        limit."""
        above = [each for each in self._rungs if each.peak_bytes > rung.peak_bytes]
        new = min(above, key=lambda each: each.peak_bytes) if above else self._full_budget_rung()
        room = room_bytes(self._device)
        if room is not None and room < new.growth_bytes + self._reserve_bytes:
            return rung
        self.pressure.raise_limit(None if new is self._full_rung else new.peak_bytes)
        if new is not rung:
            logger.warning("%s: no memory shortage for some steps; back to %s", self._title, new)
        return new

    def _tighten_after_error_outside(self, rung: Rung) -> Rung:
        """A tighter plan, after the loss, the optimizer or something else ran out of memory."""
        self.pressure.lower_limit(rung.tighter_peak_bytes)
        tighter = self._current_rung()
        if tighter is not rung:
            logger.warning(
                "%s: out of memory outside of the model's passes since the last step with %s; this "
                "step runs with %s",
                *(self._title, rung, tighter),
            )
        return tighter

    def _rung_for_free_memory(self, rung: Rung) -> Rung:
        """This plan, or a tighter one if too little is free on the device."""
        room = room_bytes(self._device)
        if room is None or room >= rung.growth_bytes + SHARE_OF_RESERVE * self._reserve_bytes:
            return rung
        limit_bytes = rung.resident_bytes + room - self._reserve_bytes
        self.pressure.lower_limit(limit_bytes)
        tighter = self._current_rung()
        if tighter is not rung:
            logger.warning(
                "%s: %s are free on the device, too little for %s; the step runs with %s",
                *(self._title, format_size(max(0, room)), rung, tighter),
            )
        return tighter


def current_program(program: StepProgram) -> BoundProgram:
    """The program of a plan of `fit`; of a ladder, that of its fastest plan within the limit."""
    found = program.program() if isinstance(program, Ladder) else program
    assert isinstance(found, BoundProgram)
    return found


def ladder_of(
    to_plan: StepToPlan,
    pressure: Pressure,
    *,
    title: str,
    device: torch.device,
    started_s: float,
    solve: Callable[[StepToPlan, float], Solution],
    build_program: Callable[..., BoundProgram],
) -> Ladder:
    """The ladder of a step, with its first plan. It does not keep the batch alive.

    started_s: when the call began to wait for a plan.
    solve: (step to plan, when the wait for it began) -> the solver's answer.
    build_program: (step to plan, solution, tighter=...) -> the program that runs the solution.
    """

    def make_rung(ladder: Ladder, available_bytes: int) -> Rung | Solution:
        limited = to_plan.with_limit(available_bytes)
        progress_text = f"planning {title} within {format_size(available_bytes)}..."
        with nullcontext() if ladder.is_empty else telling(progress_text, in_lines=True):
            solution = solve(limited, started_s if ladder.is_empty else now_s())
        if solution.schedule is None:
            return solution
        return Rung(solution, build_program(limited, solution, tighter=ladder.tighter))

    ladder = Ladder(
        make_rung,
        pressure,
        title=title,
        device=device,
        available_bytes=to_plan.request.available_bytes,
        reserve_bytes=to_plan.request.reserve_bytes,
    )
    ladder.program()
    return ladder
