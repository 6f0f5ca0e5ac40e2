"""What --verify found, beside what was predicted."""

from __future__ import annotations

import dataclasses

from solver.reporting.report_data import to_json
from solver.reporting.verification_rows import verification_rows, verification_table
from solver.sizes_deadlines_progress import IN_PYTHON, OF_THE_COMMAND
from tests.solver.reporting.test_report import gpt2, planned, report_of, shown, verified

__all__ = ["gpt2", "planned"]


def test_a_verification_is_told_beside_the_prediction(planned):
    found = verified()
    text = shown(report_of(planned, verification=found))
    for words in (
        "Verification  passed",
        "3.20 GB",
        "5.30 GB",
        "1.50 s",
        "149 gradients",
        "3.50 GB",
    ):
        assert words in text
    assert "without plan above the budget by 1.30 GB" in " ".join(text.split())
    many = dataclasses.replace(found, differences=tuple(f"gradient of w{i}" for i in range(9)))
    assert not many.passed
    assert "and 5 more" in shown(report_of(planned, verification=many))


def test_a_verification_prints_readably():
    found = verified()
    assert repr(found) == str(found)
    assert str(found).splitlines() == [
        (
            "Verification passed, WARNING; peak with the plan 3.23 % above the prediction; bitwise "
            "identical"
        ),
        "  plan         peak 3.20 GB measured, 3.10 GB predicted",
        "  baseline     peak 5.30 GB measured, 5.20 GB predicted",
        "  budget       4.00 GB available",
        "  overhead     +20.00 % measured, +11.11 % predicted",
        "  device       the CPU",
        f"  warning      {found.warnings[0]}",
    ]
    above = dataclasses.replace(found, available_bytes=3 * 10**9)
    assert str(above).startswith("Verification FAILED: above the budget, bitwise identical\n")
    many = dataclasses.replace(found, differences=tuple(f"gradient of w{i}" for i in range(9)))
    first, second, *_ = lines = str(many).splitlines()
    assert first == "Verification FAILED: 9 results not as the plan promises"
    assert second == "  differs      gradient of w0"
    assert lines[5] == "               and 5 more"


def test_measured_peaks_that_are_not_the_predicted_ones_are_warnings(planned):
    close = dataclasses.replace(
        verified(), measured_peak_bytes=3_150_000_000, baseline_measured_peak_bytes=5_250_000_000
    )
    assert close.warnings == ()
    assert "WARNING" not in shown(report_of(planned, verification=close))
    assert close.headline == "passed"
    found = dataclasses.replace(close, measured_peak_bytes=3_720_000_000)
    assert "passed, WARNING; peak with the plan 20.00 % above the prediction" in found.line
    text = " ".join(shown(report_of(planned, verification=found)).split())
    above = "with the plan the measured peak is 3.72 GB, 20.00 % above the predicted 3.10 GB"
    assert f"WARNING {above} above: likely workspace" in text
    assert "below: likely" not in text
    assert "(--costs measured)" in text
    in_python = " ".join(shown(report_of(planned, verification=found, reader=IN_PYTHON)).split())
    assert '(costs="measured")' in in_python
    assert "--costs" not in in_python
    found = dataclasses.replace(found, baseline_measured_peak_bytes=4_160_000_000)
    below = "without the plan the measured peak is 4.16 GB, 20.00 % below the predicted 5.20 GB"
    assert found.warnings == (above, below)
    text = " ".join(shown(report_of(planned, verification=found)).split())
    assert "above: likely workspace" in text
    assert "below: likely code" in text
    assert to_json(report_of(planned, verification=found))["verification"]["warnings"] == [
        above,
        below,
    ]
    words = "Verification passed, WARNING; peak with the plan 20.00 % above the prediction; peak "
    assert words + "without the plan 20.00 % below the prediction" in text
    small = dataclasses.replace(verified(), measured_peak_bytes=60_000, predicted_peak_bytes=50_000)
    assert len(small.warnings) == 0  # what a peak is measured to


def test_peaks_of_another_device_have_that_as_the_reason(planned):
    found = dataclasses.replace(verified(), planned_for="NVIDIA H100")
    text = " ".join(shown(report_of(planned, verification=found)).split())
    assert "the prediction is for NVIDIA H100, with the workspaces" in text
    assert "above: likely" not in text


def test_a_step_that_was_predicted_to_fit_without_the_plan_and_does_not_has_failed(planned):
    found = dataclasses.replace(verified(), baseline_predicted_peak_bytes=3_900_000_000)
    assert found.fits
    assert not found.passed
    text = " ".join(shown(report_of(planned, verification=found)).split())
    assert "Verification FAILED" in text
    assert "without plan above the budget by 1.30 GB (1.21 GiB), NOT AS PREDICTED" in text
    assert verified().passed


def test_the_table_shows_the_times_that_the_overhead_is_of(planned):
    # The medians of the times, 1.20 s and 1.00 s, are not those of any round.
    found = dataclasses.replace(
        verified(), times_s=(1.1, 1.2, 6.0), baseline_times_s=(1.0, 0.9, 5.0)
    )
    _, (_, _, with_plan, _, without) = verification_table(found).rows
    assert (with_plan, without) == ("6.00 s", "5.00 s")
    assert "+20.00 % (+10.00 % to +33.33 % in 3 rounds) measured" in repr(found)
    in_json = to_json(report_of(planned, verification=found))["verification"]
    assert in_json["measured_time_s"] / in_json["baseline_measured_time_s"] - 1 == found.overhead
    timing = dict(verification_rows(found, reader=IN_PYTHON))["timing"]
    assert "3 rounds: 1.10 s to 6.00 s with the plan, 900 ms to 5.00 s without" in timing


def test_the_measured_overhead_has_its_range():
    found = dataclasses.replace(
        verified(), times_s=(1.25, 9.0, 3.0), baseline_times_s=(1.0, 8.0, 2.0)
    )
    assert found.overhead == 0.25
    assert "+25.00 % (+12.50 % to +50.00 % in 3 rounds) measured, +11.11 % predicted" in repr(found)
    rows = dict(verification_rows(found, reader=IN_PYTHON))
    assert rows["overhead"].startswith("+25.00 % (+12.50 % to +50.00 % in 3 rounds) measured")
    assert "rounds" not in repr(verified())


def test_a_prediction_by_the_rates_of_a_device_says_so():
    found = dataclasses.replace(verified(), rates_of="NVIDIA H100")
    said = "+11.11 % predicted by the rates of NVIDIA H100; to compare the two, plan for this "
    for reader in (IN_PYTHON, OF_THE_COMMAND):
        row = dict(verification_rows(found, reader=reader))["overhead"]
        assert row.endswith(f"{said}machine with {reader.measured}")
    assert said in repr(found)
    assert "rates" not in repr(verified())
