"""The result of a verification (`--verify`) as rows and a table of the report."""

from __future__ import annotations

from collections.abc import Iterator

from solver.reporting.rows import Row, Table
from solver.reporting.verification import N_SHOWN, Verification
from solver.sizes_deadlines_progress import (
    Reader,
    counted,
    format_both,
    format_size,
    format_time,
)

_WHY_ABOVE = (
    "above: likely workspace of kernels that the costs do not know ({measured}), or tensors that "
    "forward allocates at its first call, keeps outside of the step or holds in variables"
)
_WHY_BELOW = (
    "below: likely code that writes into parts of tensors or drops them early where the trace has "
    "separate tensors, or workspace that kernels of this machine do not take"
)

_WHY_OTHER = (
    "the prediction is for {card}, with the workspaces, rounding and operators of that card: only "
    "the results are verified here, and the plan's peak there"
)


def verification_table(found: Verification) -> Table:
    """A table of peaks and step times, predicted and measured, with and without the plan."""
    names = ("predicted", "measured", "baseline_predicted", "baseline_measured")
    peaks = (format_size(getattr(found, f"{name}_peak_bytes")) for name in names)
    times = (format_time(getattr(found, f"{name}_time_s")) for name in names)
    heads = ("", "plan, predicted", "measured", "baseline, predicted", "measured")
    return Table(heads, (("peak", *peaks), ("step time", *times)))


def _range(times_s: tuple[float, ...]) -> str:
    """ "1.00 s to 1.20 s"."""
    return f"{format_time(min(times_s))} to {format_time(max(times_s))}"


def verification_rows(found: Verification, *, reader: Reader) -> Iterator[Row]:
    """Rows on the device, times, memory, warnings, and whether the results are as promised.

    reader: phrases advice for the command line or for Python.
    """
    yield "device", found.device
    rounds = counted(len(found.times_s), "round")
    times = f"{_range(found.times_s)} with the plan, {_range(found.baseline_times_s)} without"
    text = f"times of the round with the median overhead; over {rounds}: {times}"
    yield "timing", f"{text}. Other load on the machine affects them"
    yield "overhead", found.overhead_text(reader)
    if found.fits:
        yield "budget", f"met: {format_both(found.available_bytes)} available"
    else:
        over = found.measured_peak_bytes - found.available_bytes
        yield "budget", f"EXCEEDED by {format_both(over)}"
    if not found.baseline_fits:
        over = found.baseline_measured_peak_bytes - found.available_bytes
        is_known = found.baseline_predicted_peak_bytes > found.available_bytes
        text = "as predicted: the step needs the plan" if is_known else "NOT AS PREDICTED"
        yield "without plan", f"above the budget by {format_both(over)}, {text}"
    if found.reserved_bytes is not None:
        text = f"{format_both(found.reserved_bytes)} reserved"
        if found.context_bytes is not None:
            text += f"; {format_size(found.context_bytes)} of the device used outside of it"
        yield "allocator", text
    for line in found.warnings:
        yield "WARNING", line
    if found.planned_for and found.warnings:
        yield "", _WHY_OTHER.format(card=found.planned_for)
    elif found.has_peak_above:
        yield "", _WHY_ABOVE.format(measured=reader.measured)
    if found.has_peak_below and not found.planned_for:
        yield "", _WHY_BELOW
    if not found.differences:
        gradients = counted(found.n_gradients, "gradient")
        if found.results == "bitwise":
            text = f"loss, {gradients} and buffers are bitwise identical to the baseline"
        elif found.results == "lossy":
            text = (
                f"loss and buffers are bitwise identical to the baseline; errors of {gradients} "
                f"against it: {found.largest_error}"
            )
        else:
            text = (
                f"errors of loss and {gradients} against float64 are at most twice the baseline's; "
                f"{found.largest_error}"
            )
        yield "results", text
        return
    for difference in found.differences[:N_SHOWN]:
        yield "DIFFERS", difference
    if len(found.differences) > N_SHOWN:
        yield "", f"and {len(found.differences) - N_SHOWN} more"
