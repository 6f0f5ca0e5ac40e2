"""The one place where solver reaches scheduler_runtime: verifying a plan, planning by submodules.

Imports go one way, `scheduler_runtime → solver → graphs`. The command and `solver.reporting` still
have to run a model, and they are in solver because they must start without torch. So the runtime is
imported here, by name and only when needed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from solver.common import counted, format_size
from solver.schedule import Solution


def run_verifier(solution: Solution, **step: Any) -> Verification:
    """`scheduler_runtime.verifying.verify`: run the step with and without the plan.

    step: model, batch, optimizer: functions that create them; loss, inputs: functions or None;
    device, autocast: strings, autocast or None; say: is told what runs next.

    Imports torch. Raises ValueError for a plan of another model; RuntimeError and MemoryError for a
    step that cannot be run here.
    """
    found: Verification = importlib.import_module("scheduler_runtime.verifying").verify(
        solution, **step
    )
    return found


def run_submodule_planner(**step: Any) -> Planned:
    """`scheduler_runtime.fallback.planned_for_command`: measure real steps, plan their submodules.

    step: as for `run_verifier`, without autocast; budget_bytes, reserve_bytes, time_limit_s.

    Imports torch. Raises NoRowError if there is no sequence of submodules, and whatever the model
    raises.
    """
    found: Planned = importlib.import_module("scheduler_runtime.fallback").planned_for_command(
        **step
    )
    return found


PLAN_BY_SUBMODULES = (
    "to plan by submodules: scheduler_runtime.fallback.plan_chain(model, batch, budget=...)"
)
"""Added to a TraceError of a model that runs."""


class VerifyError(ValueError):
    """The step cannot be run with and without the plan here; says why."""


@dataclass(frozen=True)
class Verification:
    """The step measured on `device` with the plan, and without it (baseline).

    available_bytes: what the plan may use.
    results: what was compared: "bitwise", or "allclose", errors against the step in float64.
    largest_error: that of the result which is closest to what is allowed, in words ("": bitwise).
    differences: results that are not bitwise identical, such as "gradient of head.weight"; or whose
        errors are too large.
    unsteady: results that also differ between runs of the baseline, and are not compared.
    reserved_bytes: reserved by CUDA's allocator with the plan (None on the CPU).
    context_bytes: used on the device beside that, by contexts, kernels and other processes.
    spread_s: between the slowest and fastest of n_timed_steps, whose medians are the times.
    """

    device: str
    available_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    baseline_predicted_peak_bytes: int
    baseline_measured_peak_bytes: int
    predicted_time_s: float
    measured_time_s: float
    baseline_predicted_time_s: float
    baseline_measured_time_s: float
    n_gradients: int
    differences: tuple[str, ...]
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    spread_s: float = 0.0
    n_timed_steps: int = 1
    unsteady: tuple[str, ...] = ()
    results: str = "bitwise"
    largest_error: str = ""

    @property
    def fits(self) -> bool:
        return self.measured_peak_bytes <= self.available_bytes

    @property
    def passed(self) -> bool:
        return self.fits and not self.differences

    @property
    def line(self) -> str:
        """The verdict in one line."""
        results = "bitwise identical" if self.results == "bitwise" else "errors as promised"
        if self.differences:
            results = f"{counted(len(self.differences), 'result')} DIFFER"
        peak = f"peak {format_size(self.measured_peak_bytes)}"
        peak += f", predicted {format_size(self.predicted_peak_bytes)}"
        budget = "" if self.fits else ", ABOVE THE BUDGET"
        return f"{'verified' if self.passed else 'NOT verified'}: {results}; {peak}{budget}"


class NoRowError(ValueError):
    """The model cannot be planned by submodules either; says why."""


@dataclass(frozen=True)
class Planned:
    """notes: sentences on how the submodules are planned and how to run the plan."""

    solution: Solution
    notes: tuple[str, ...]
