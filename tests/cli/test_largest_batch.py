"""`solve --max-batch` and `--max-seq`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoint_solver.cli.largest_batch
from checkpoint_solver.cli.command import main
from solver.schedule.solution import Solution
from solver.solving import attempt
from tests.support.command import failed, write_model
from tests.support.paths import GPT2


def run_json(capsys, *argv: str) -> dict:
    code = main([*argv, "--json", "--method", "sqrt"])
    value = json.loads(capsys.readouterr().out)
    assert value["exit_code"] == code
    return value


@pytest.mark.slow
def test_the_command_finds_the_largest_batch(tmp_path, capsys):
    model = write_model(tmp_path)
    found = run_json(capsys, "--max-batch", "--budget", "300KB", model)
    n = found["sizes"]["largest"]
    assert n > 64
    assert run_json(capsys, "--budget", "300KB", "--batch-size", str(n), model)["exit_code"] == 0
    more = ("--batch-size", str(n + 1))
    assert run_json(capsys, "--budget", "300KB", *more, model)["exit_code"] == 3
    assert found["schedule"]["peak_bytes"] <= 300_000
    assert f"batch size {n})" in found["problem"]


@pytest.mark.slow
def test_the_report_and_the_files(tmp_path, capsys):
    model = write_model(tmp_path)
    names = ("s.json", "g.json", "t.svg", "page.html")
    schedule, graph, picture, page = (str(tmp_path / name) for name in names)
    argv = [
        "--max-batch",
        "--budget",
        "300KB",
        "--method",
        "sqrt",
        "-o",
        schedule,
        "--graph-out",
        graph,
    ]
    assert main([*argv, "--throughput", picture, "--report", page, "--verify", model]) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "Batch sizes" in text
    assert "samples/s" in text
    assert "sqrt found none" in text
    assert "saturates at" in text
    assert "Verification passed" in text  # with the batch that was found
    assert Solution.load(schedule, graph=graph).simulation.peak_bytes <= 300_000
    assert "samples per second" in Path(page).read_text()
    assert "<svg" in Path(picture).read_text()


@pytest.mark.slow
def test_the_longest_sequence(tmp_path, capsys):
    changes = (
        ("def get_batch(batch_size=64):", "def get_batch(batch_size=2, seq_length=8):"),
        ("torch.randn(batch_size, 32)", "torch.randn(batch_size, seq_length, 32)"),
    )
    model = write_model(tmp_path, *changes)
    argv = ("--max-seq", "--budget", "2MB", "--batch-size", "3", model)
    found = run_json(capsys, *argv)
    n = found["sizes"]["largest"]
    assert n > 128
    assert any("table of positions" in note for note in found["notes"])
    sizes = ("--budget", "2MB", "--batch-size", "3")
    assert run_json(capsys, *sizes, "--seq-length", str(n), model)["exit_code"] == 0
    longer = str(n + n // 64 + 1)
    assert run_json(capsys, *sizes, "--seq-length", longer, model)["exit_code"] == 3


@pytest.mark.slow
def test_the_budget_is_by_default_all_that_the_device_has(tmp_path, capsys):
    model = write_model(
        tmp_path, ("torch.randn(batch_size, 32)", "torch.randn(batch_size * 4 * 10**6, 32)")
    )
    found = run_json(capsys, "--max-batch", "--method", "none", "--device", "t4", model)
    assert found["budget_bytes"] == 16 * 10**9
    assert found["sizes"]["largest"] >= 4
    assert "--budget is required" in failed(capsys, "--max-batch", "--device", "cpu", model, code=2)


def test_nothing_fits_is_infeasible(tmp_path, capsys):
    model = write_model(tmp_path)
    code = main(["--max-batch", "--budget", "1KB", model])
    printed = capsys.readouterr()
    assert code == 3
    assert "none of the sizes tried fits" in printed.out
    assert "infeasible" in printed.err


@pytest.mark.slow
def test_ctrl_c_reports_the_largest_so_far(tmp_path, capsys, monkeypatch):
    def interrupted(graph, request, **options):
        shapes = graph.plain.meta.environment["shapes"]
        if shapes[0][0] > 8:
            raise KeyboardInterrupt
        return attempt(graph, request, **options)

    monkeypatch.setattr(checkpoint_solver.cli.largest_batch, "attempt", interrupted)
    assert main(["--max-batch", "--budget", "1MB", write_model(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "largest 4" in text
    assert "Interrupted: the largest size found to fit so far." in text


@pytest.mark.slow
def test_a_size_that_the_model_refuses_is_told(tmp_path, capsys):
    model = write_model(tmp_path, ("return torch", "assert batch_size <= 5\n    return torch"))
    found = run_json(capsys, "--max-batch", "--budget", "1MB", model)
    assert found["sizes"]["largest"] == 5
    assert any("Size 6 could not be traced" in note for note in found["notes"])


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("argv", "changes", "reason"),
    [
        (
            ["--max-batch"],
            [("batch_size=64", ""), ("batch_size, 32", "64, 32")],
            "get_batch does not accept batch_size; define it as get_batch(batch_size=",
        ),
        (["--max-seq"], [], "define it as get_batch(seq_length=1024)"),
        (["--max-batch"], [("randn(batch_size", "randn(64")], "sizes 1 and 4 give the same step"),
        (["--max-batch", "--max-seq"], [], "not allowed with"),
        (["--max-batch", "--compare"], [], "--compare cannot be combined with --max-batch"),
        (["--throughput", "t.png"], [], "--throughput requires --max-batch"),
        (["--max-batch", "--throughput", "t.gif"], [], "must end in .png or .svg"),
    ],
)
def test_what_is_refused(argv, changes, reason, tmp_path, capsys):
    line = failed(capsys, *argv, "--budget", "1MB", write_model(tmp_path, *changes), code=2)
    assert reason in line


def test_a_graph_file_has_one_size(capsys):
    assert "--max-batch: not possible with a graph file" in failed(
        capsys, "--max-batch", "--budget", "4GB", str(GPT2), code=2
    )
