"""The one place where solver reaches scheduler_runtime: verifying a plan, planning by submodules.

Imports go one way, `scheduler_runtime → solver → graphs`. The command and `solver.reporting` still
have to run a model, and they are in solver because they must start without torch. So the runtime is
imported here, by name and only when needed.
"""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass
from typing import Any

from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    IN_PYTHON,
    Reader,
    counted,
    format_percent,
    format_share,
    format_size,
)

NOTABLE_SHARE = 0.02
"""Of a predicted peak: what a measured one may differ by without a warning."""
MEASURED_WITHIN_BYTES = 100_000
"""What a peak is measured to on the CPU (`scheduler_runtime.measuring`)."""


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


N_REAL_STEPS = 11
"""That `run_submodule_planner` runs, if the first plan takes what was predicted."""


class VerifyError(ValueError):
    """The step cannot be run with and without the plan here; says why."""


N_SHOWN = 4
"""Differing results that are named."""


_VERDICTS = {
    "bitwise": "bitwise identical",
    "allclose": "errors as promised",
    "lossy": "gradients rounded, errors measured",
}


@dataclass(frozen=True, repr=False)
class Verification:
    """The step measured on `device` with the plan, and without it (baseline).

    available_bytes: what the plan may use.
    planned_for: the card whose peaks are predicted, where the device is another ("": the same).
    rates_of: the device whose rates give the predicted times ("": operators measured here, or not
        known).
    results: what was compared: "bitwise"; "allclose", errors against the step in float64; "lossy",
        loss and buffers bitwise, the errors of gradients measured, against the step without the
        plan.
    largest_error: that of the result which is closest to what is allowed, or what was measured, in
        words ("": bitwise).
    differences: results that are not bitwise identical, such as "gradient of head.weight"; or whose
        errors are too large.
    unsteady: results that also differ between runs of the baseline, and are not compared.
    reserved_bytes: reserved by CUDA's allocator with the plan (None on the CPU).
    context_bytes: used on the device beside that, by contexts, kernels and other processes.
    spread_s: between the slowest and fastest of n_timed_steps, whose medians are the times.
    overheads: of each round, in which both steps were timed one after the other (shares).
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
    overheads: tuple[float, ...] = ()
    unsteady: tuple[str, ...] = ()
    results: str = "bitwise"
    largest_error: str = ""
    planned_for: str = ""
    rates_of: str = ""

    @property
    def fits(self) -> bool:
        return self.measured_peak_bytes <= self.available_bytes

    @property
    def baseline_fits(self) -> bool:
        """Whether the step takes no more than the plan may use without the plan, too."""
        return self.baseline_measured_peak_bytes <= self.available_bytes

    @property
    def passed(self) -> bool:
        return not self.memory_failures and not self.differences

    @property
    def memory_failures(self) -> tuple[str, ...]:
        """Sentences on measured peaks above what the plan may use, where the prediction is not."""
        failures = []
        if not self.fits:
            failures.append("the measured peak exceeds the budget")
        if not self.baseline_fits and self.baseline_predicted_peak_bytes <= self.available_bytes:
            failures.append(
                f"without the plan the step takes {format_size(self.baseline_measured_peak_bytes)},"
                f" more than the budget; {format_size(self.baseline_predicted_peak_bytes)} were "
                "predicted"
            )
        return tuple(failures)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on measured peaks that are not the predicted ones."""
        return tuple(
            f"{name} the measured peak is {format_size(measured)}, {_off(measured, predicted)} the "
            f"predicted {format_size(predicted)}"
            for name, measured, predicted in self._unpredicted
        )

    @property
    def has_peak_above(self) -> bool:
        """Whether a measured peak is notably above the predicted one."""
        return any(measured > predicted for _, measured, predicted in self._unpredicted)

    @property
    def has_peak_below(self) -> bool:
        """Whether a measured peak is notably below the predicted one."""
        return any(measured < predicted for _, measured, predicted in self._unpredicted)

    @property
    def _unpredicted(self) -> tuple[tuple[str, int, int], ...]:
        """Of runs whose measured peak is not the predicted one: what ran, and both in bytes."""
        with_plan = self.measured_peak_bytes, self.predicted_peak_bytes
        without = self.baseline_measured_peak_bytes, self.baseline_predicted_peak_bytes
        runs = (("with the plan", *with_plan), ("without the plan", *without))
        return tuple(
            (name, measured, predicted)
            for name, measured, predicted in runs
            if abs(measured - predicted) > max(NOTABLE_SHARE * predicted, MEASURED_WITHIN_BYTES)
        )

    @property
    def overhead(self) -> float:
        """Measured, as a share of the baseline's time: the median of the rounds."""
        if self.overheads:
            return statistics.median(self.overheads)
        return self.measured_time_s / (self.baseline_measured_time_s or 1.0) - 1.0

    def overhead_text(self, reader: Reader) -> str:
        """Measured, with the range of the rounds, beside predicted: "+3.10 % (+2.00 % to +4.40 % in
        3 rounds) measured, +3.00 % predicted"; and what to do where these are of other times."""
        measured = format_share(self.overhead)
        if len(self.overheads) > 1:
            least, most = map(format_share, (min(self.overheads), max(self.overheads)))
            measured += f" ({least} to {most} in {len(self.overheads)} rounds)"
        planned = self.predicted_time_s / (self.baseline_predicted_time_s or 1.0) - 1.0
        predicted = f"{format_share(planned)} predicted"
        if self.rates_of:
            predicted += (
                f" by the rates of {self.rates_of}; to compare the two, plan for this machine with "
                f"{reader.measured}"
            )
        return f"{measured} measured, {predicted}"

    @property
    def headline(self) -> str:
        """What a report has beside the title: whether it passed, and with peaks as predicted."""
        if not self.passed:
            return "FAILED"
        if not self._unpredicted:
            return "passed"
        peaks = (
            f"peak {name} {_off(measured, predicted)} the prediction"
            for name, measured, predicted in self._unpredicted
        )
        return "; ".join(("passed, WARNING", *peaks))

    @property
    def verdict(self) -> str:
        """What came out, in a few words."""
        if self.differences:
            return f"FAILED: {counted(len(self.differences), 'result')} not as the plan promises"
        results = _VERDICTS[self.results]
        if self.memory_failures:
            what = "above the budget" if not self.fits else "baseline above the budget"
            return f"FAILED: {what}, {results}"
        return f"{self.headline}; {results}" if self._unpredicted else f"passed: {results}"

    @property
    def line(self) -> str:
        """One line: the verdict, and the peak with the plan."""
        measured, predicted = self.measured_peak_bytes, self.predicted_peak_bytes
        peak = f"peak {format_size(measured)} (predicted {format_size(predicted)})"
        return f"verification {self.verdict}; {peak}"

    def __repr__(self) -> str:
        """Several lines, as a report has them: `verify(...)` at the end of a notebook's cell."""
        lines = [f"Verification {self.verdict}"]
        lines += [f"  differs      {words}" for words in self.differences[:N_SHOWN]]
        if (n_more := len(self.differences) - N_SHOWN) > 0:
            lines += [f"               and {n_more} more"]
        peaks = (
            ("plan", self.measured_peak_bytes, self.predicted_peak_bytes),
            ("baseline", self.baseline_measured_peak_bytes, self.baseline_predicted_peak_bytes),
        )
        lines += [
            f"  {name:<11}  peak {format_size(here)} measured, {format_size(planned)} predicted"
            for name, here, planned in peaks
        ]
        lines += [
            f"  budget       {format_size(self.available_bytes)} available",
            f"  overhead     {self.overhead_text(IN_PYTHON)}",
            f"  device       {self.device}",
            *(f"  warning      {line}" for line in self.warnings),
        ]
        return "\n".join(lines)


def _off(measured_bytes: int, predicted_bytes: int) -> str:
    """ "11.20 % above"."""
    share = format_percent(abs(measured_bytes / (predicted_bytes or 1) - 1))
    return f"{share} {'above' if measured_bytes > predicted_bytes else 'below'}"


class NoRowError(ValueError):
    """The model cannot be planned by submodules either; says why."""


@dataclass(frozen=True)
class Planned:
    """notes: sentences on how the submodules are planned and how to run the plan."""

    solution: Solution
    notes: tuple[str, ...]
