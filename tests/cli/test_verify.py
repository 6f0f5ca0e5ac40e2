"""`solve --verify`: the step with and without the plan, what is said of it, and how it fails."""

from __future__ import annotations

import json

import pytest

from checkpoint_solver.cli.command import main
from solver.reporting import Verification
from tests.cli.test_model_file import PLAN


@pytest.mark.slow
def test_verify_runs_the_step_both_ways(model_file, capsys):
    assert main([*PLAN, "--method", "every_block", "--verify", model_file()]) == 0
    out, err = capsys.readouterr()
    assert "verifying: memory and time without and with the plan in turns, 10 steps" in err
    assert "Verification  passed" in out
    text = " ".join(out.split())
    assert "8 gradients and buffers are bitwise identical" in text
    assert "predicted by the rates of a generic CPU; to compare the two" in text


def found(**changes) -> Verification:
    fields = {
        "device": "the CPU",
        "available_bytes": 10**6,
        "predicted_peak_bytes": 9 * 10**5,
        "measured_peak_bytes": 9 * 10**5,
        "baseline_predicted_peak_bytes": 9 * 10**5,
        "baseline_measured_peak_bytes": 9 * 10**5,
        "predicted_time_s": 1.0,
        "times_s": (1.0,),
        "baseline_predicted_time_s": 1.0,
        "baseline_times_s": (1.0,),
        "n_gradients": 8,
        "differences": (),
    }
    return Verification(**{**fields, **changes})


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("changes", "printed", "line"),
    [
        ({"measured_peak_bytes": 2 * 10**6}, "EXCEEDED by 1.00 MB", "exceeds the budget"),
        (
            {"baseline_measured_peak_bytes": 2 * 10**6},
            "above the budget by 1.00 MB",
            "without the plan the step takes 2.00 MB, more than the budget; 900.0 KB were",
        ),
        (
            {"differences": ("gradient of w: 3 of 4",)},
            "gradient of w: 3 of 4",
            "not bitwise identical",
        ),
    ],
)
def test_verify_that_fails(changes, printed, line, model_file, capsys, monkeypatch):
    monkeypatch.setattr(
        "scheduler_runtime.verifying.run_both_steps", lambda *_, **__: found(**changes)
    )
    assert main([*PLAN, "--verify", model_file()]) == 5
    output = capsys.readouterr()
    assert "Verification  FAILED" in output.out
    assert printed in output.out
    assert line in output.err


@pytest.mark.slow
def test_the_report_is_there_before_the_steps_run(model_file, tmp_path, capsys, monkeypatch):
    before = []

    def verify(*_arguments, **_options):
        print("from the model file")  # belongs on stderr, as before
        before.append(capsys.readouterr())
        return found()

    monkeypatch.setattr("scheduler_runtime.verifying.run_both_steps", verify)
    page = tmp_path / "page.html"
    options = [*PLAN, "--verify"]
    assert main([*options, "--report", str(page), model_file()]) == 0
    after = capsys.readouterr().out
    assert "Answer  optimal" in before[0].out
    assert "Verification" not in before[0].out
    assert "from the model file" in before[0].err
    assert "Answer" not in after
    assert after.count("Verification  passed") == 1
    assert f"page{page}" in "".join(after.split())  # a long path is folded
    assert "Verification" in page.read_text()
    assert main([*options, "--json", model_file()]) == 0
    assert before[1].out == ""
    assert json.loads(capsys.readouterr().out)["verification"]["passed"]
    assert main([*options, "--quiet", model_file()]) == 0
    assert before[2].out == capsys.readouterr().out == ""


def test_verify_warns_of_a_peak_that_is_not_the_predicted_one(model_file, capsys, monkeypatch):
    other = found(available_bytes=2 * 10**6, baseline_measured_peak_bytes=12 * 10**5)
    monkeypatch.setattr("scheduler_runtime.verifying.run_both_steps", lambda *_, **__: other)
    assert main([*PLAN, "--verify", model_file()]) == 0
    words = "without the plan the measured peak is 1.20 MB, 33.33 % above the predicted 900.0 KB"
    assert f"solve: warning: --verify: {words}" in capsys.readouterr().err


def test_verify_that_cannot_run(model_file, capsys, monkeypatch):
    def out_of_memory(*_arguments, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("scheduler_runtime.verifying.run_both_steps", out_of_memory)
    assert main([*PLAN, "--verify", model_file()]) == 5
    output = capsys.readouterr()
    assert "can't allocate memory" in " ".join(output.out.split())
    assert "can't allocate memory" in output.err


def test_verify_with_another_batch_in_each_call(model_file, capsys):
    growing = ("batch_size=64):", "sizes=[16, 32, 48]):\n    batch_size = sizes.pop()")
    assert main([*PLAN, "--verify", model_file(growing)]) == 5
    line = capsys.readouterr().err.splitlines()[-1]
    assert "not the planned step: argument x has shape [16, 32], planned for [32, 32]." in line
    assert "get_batch of a model file) have to return the planned shapes" in line
    assert "apply(" not in line
