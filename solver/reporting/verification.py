"""The outcome of a verification: the step measured with its plan and without, and the verdict."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from solver.sizes_deadlines_progress import (
    IN_PYTHON,
    Reader,
    counted,
    format_percent,
    format_share,
    format_size,
)

NOTABLE_SHARE = 0.02
"""A measured peak may differ from the predicted one by this share of it without a warning."""
MEASURED_WITHIN_BYTES = 100_000
"""How exactly peaks are measured on the CPU (`scheduler_runtime.measuring`)."""
N_SHOWN = 4
"""How many of the differing results are named."""

_VERDICTS = {
    "bitwise": "bitwise identical",
    "allclose": "errors as promised",
    "lossy": "gradients rounded, errors measured",
}


@dataclass(frozen=True, repr=False)
class Verification:
    """One training step, measured on `device` with the plan and without it (the baseline).

    device: the device's name.
    available_bytes: the budget after the reserve.
    predicted_peak_bytes, measured_peak_bytes: with the plan; baseline_...: without it.
    predicted_time_s: of the step with the plan; baseline_...: without it.
    times_s, baseline_times_s: of the step with the plan and without it, as measured in each round
        of timing.
    n_gradients: how many gradients were compared.
    differences: the results that are not as the plan promises, in words, such as "gradient of
        head.weight: 3 of 4": not bitwise identical, or with too large an error.
    reserved_bytes: reserved by CUDA's allocator with the plan (None on the CPU).
    context_bytes: what else is used on the device, by contexts, kernels and other processes.
    unsteady: results that also differ between two runs of the baseline; they are not compared.
    results: how results were compared. "bitwise"; "allclose": by their errors against the step in
        float64; "lossy": loss and buffers bitwise, gradients by their errors against the baseline.
    largest_error: in words, the error closest to its limit, or the largest one ("": bitwise).
    planned_for: the card that peaks are predicted for, if it is not `device` ("": it is).
    rates_of: the device whose published rates give the predicted times ("": operators were
        measured here, or it is not known).
    """

    device: str
    available_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    baseline_predicted_peak_bytes: int
    baseline_measured_peak_bytes: int
    predicted_time_s: float
    times_s: tuple[float, ...]
    baseline_predicted_time_s: float
    baseline_times_s: tuple[float, ...]
    n_gradients: int
    differences: tuple[str, ...]
    reserved_bytes: int | None = None
    context_bytes: int | None = None
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
        """Whether the step fits the budget without the plan, too."""
        return self.baseline_measured_peak_bytes <= self.available_bytes

    @property
    def passed(self) -> bool:
        return not self.memory_failures and not self.differences

    @property
    def memory_failures(self) -> tuple[str, ...]:
        """Sentences on peaks that exceed the budget although the prediction does not."""
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
        """Sentences on measured peaks that differ notably from the predicted ones."""
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
        """(which run, measured bytes, predicted bytes) of peaks that differ notably."""
        with_plan = self.measured_peak_bytes, self.predicted_peak_bytes
        without = self.baseline_measured_peak_bytes, self.baseline_predicted_peak_bytes
        runs = (("with the plan", *with_plan), ("without the plan", *without))
        return tuple(
            (name, measured, predicted)
            for name, measured, predicted in runs
            if abs(measured - predicted) > max(NOTABLE_SHARE * predicted, MEASURED_WITHIN_BYTES)
        )

    @property
    def overheads(self) -> tuple[float, ...]:
        """The overhead in each round, as a share of the baseline's time in that round."""
        rounds = zip(self.times_s, self.baseline_times_s, strict=True)
        return tuple(with_plan_s / (plain_s or 1.0) - 1.0 for with_plan_s, plain_s in rounds)

    @property
    def median_round(self) -> int:
        """The index of the round with the median overhead. The reported times are those of this
        round, as medians of times and of their ratios can contradict each other."""
        return self.overheads.index(statistics.median_low(self.overheads))

    @property
    def overhead(self) -> float:
        """The measured overhead as a share of the baseline's time: the median of the rounds."""
        return self.overheads[self.median_round]

    @property
    def measured_time_s(self) -> float:
        return self.times_s[self.median_round]

    @property
    def baseline_measured_time_s(self) -> float:
        return self.baseline_times_s[self.median_round]

    def overhead_text(self, reader: Reader) -> str:
        """The measured overhead with its range, and the predicted one: "+3.10 % (+2.00 % to
        +4.40 % in 3 rounds) measured, +3.00 % predicted".

        If the prediction is for another machine, the text says how to predict for this one.
        """
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
        """For the title line of a report: whether it passed, and which peaks were off."""
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
        """The outcome in a few words."""
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
        """Several lines, so that `verify(...)` at the end of a notebook cell shows a summary."""
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
