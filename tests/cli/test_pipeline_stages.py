"""`--pipeline`: the command divides a file's layers into stages and reports one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from solver import Solution
from tests.support.command import json_of

FILE = """
import torch
from torch import nn

def get_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

def not_layers():
    return nn.Linear(16, 16)

def get_batch(batch_size=64):
    return torch.randn(batch_size, 16), torch.randn(batch_size, 16)

def get_inputs(batch):
    return batch[0]

def get_loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])
"""
AUTO = ["--pipeline", "auto", "--microbatches", "4", "--device", "cpu"]
PIPELINE = ["--pipeline", "2", "--microbatches", "4", "--device", "cpu"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "layers.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.slow
def test_the_slowest_stage_is_reported_and_another_is_written(file, tmp_path, capsys) -> None:
    assert main(["--budget", "1MB", *PIPELINE, file]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "stage 0 of 2, 1f1b, 4 micro-batches; 2 micro-batches in flight" in printed
    assert "The stages of 2+1 layers take" in printed
    assert "No division has a slowest stage faster than" in printed
    schedule, graph = tmp_path / "schedule.json", tmp_path / "graph.json"
    words = ["--stage", "1", "--json", "-o", str(schedule), "--graph-out", str(graph)]
    assert main(["--budget", "1MB", *PIPELINE, *words, file]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problem"] == f"{file} (Sequential, stage 1 of 2)"
    saved = Solution.load(schedule, graph=graph)
    assert saved.environment["pipeline"]["stage"] == 1


def test_another_schedule(file, capsys) -> None:
    """One that runs fewer micro-batches than there are stages."""
    words = ["--schedule", "gpipe", "--microbatches", "1", "--stage", "1", "--method", "none"]
    assert main(["--budget", "1MB", *PIPELINE, *words, file]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "stage 1 of 2, gpipe, 1 micro-batch; 1 micro-batch in flight" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "n_stages"), [("20kB", 1), ("12kB", 2)])
def test_as_few_stages_as_fit(budget: str, n_stages: int, file: str, capsys) -> None:
    report = json_of(capsys, "--budget", budget, *AUTO, "--batch-size", "1", file)
    assert f"stage 0 of {n_stages})" in report["problem"]
    said = "No division into fewer stages (1) fits (proven)."
    assert (said in report["notes"]) == (n_stages > 1)


@pytest.mark.slow
def test_stages_of_which_a_rank_has_a_shard(file, capsys) -> None:
    """Of the first stage, of two layers: all parameters, and once more their shards; the state of
    the optimizer for shards alone."""
    report = json_of(capsys, "--budget", "1MB", *PIPELINE, "--fsdp", "2", "--stage", "0", file)
    layer_bytes, memory = (16 * 16 + 16) * 4, report["baseline"]["memory_bytes"]
    assert memory["parameters"] == 2 * layer_bytes + layer_bytes
    n_parameters = 4
    assert memory["optimizer"] == 2 * layer_bytes + 4 * n_parameters


@pytest.mark.slow
def test_each_stage_has_its_file(file, tmp_path, capsys) -> None:
    written = ["-o", str(tmp_path / "plan.json"), "--graph-out", str(tmp_path / "graph.json")]
    files = json_of(capsys, "--budget", "1MB", *PIPELINE, *written, file)["files"]
    assert set(files) == {"schedule", "schedule of stage 1", "graph", "graph of stage 1"}
    assert files["schedule"] == str(tmp_path / "plan.stage0.json")
    for stage in range(2):
        of_stage = (tmp_path / f"{what}.stage{stage}.json" for what in ("plan", "graph"))
        schedule, graph = of_stage
        saved = Solution.load(schedule, graph=graph)
        assert saved.environment["pipeline"]["stage"] == stage
    assert not (tmp_path / "plan.json").exists()
    assert main(["--budget", "9kB", *PIPELINE, "-o", str(tmp_path / "none.json"), file]) == 3
    assert not list(tmp_path.glob("none*"))


@pytest.mark.slow
def test_a_rank_applies_the_file_of_its_stage(file, tmp_path) -> None:
    """The stage is made of the layers as they are divided: 2+1."""
    import torch
    from torch import nn

    from scheduler_runtime import PlanMismatchError, apply

    output = str(tmp_path / "plan.json")
    assert main(["--budget", "1MB", *PIPELINE, "-o", output, "--quiet", file]) == 0
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    x = torch.randn(64, 16)
    first = apply(nn.Sequential(*layers[:2]), tmp_path / "plan.stage0.json")
    assert torch.equal(first(x), layers[1](layers[0](x)))
    with pytest.raises((PlanMismatchError, ValueError)):
        apply(nn.Sequential(*layers[:2]), tmp_path / "plan.stage1.json")(x)


@pytest.mark.slow
def test_where_nothing_fits_a_stage_of_the_equal_division_says_why(file, capsys) -> None:
    assert main(["--budget", "9kB", *PIPELINE, "--json", file]) == 3
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert "no schedule of stage 0 of the equal division fits 9.00 KB" in line
    assert "; minimum budget found: " in line
    report = json.loads(printed.out)
    none_fits = "No fitting division was found among 2 divisions of 3 layers into 2 stages. This is"
    assert none_fits in str(report["notes"])
    found = report["infeasible"]
    assert found["op"]
    assert found["least_budget_bytes"] >= found["proven_budget_bytes"] > 9_000


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "words", [AUTO, PIPELINE, ["--fsdp", "2", "--device", "cpu"], [*PIPELINE, "--fsdp", "2"]]
)
def test_the_largest_batch(words: list[str], file: str, capsys) -> None:
    report = json_of(capsys, "--budget", "100kB", *words, "--max-batch", file)
    largest = int(report["problem"].split("batch size ")[1].split(",")[0].rstrip(")"))
    for size, code in ((largest, 0), (largest + 1, 3)):
        options = ["--budget", "100kB", *words, "--batch-size", str(size), "--quiet"]
        assert main([*options, file]) == code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "1"], "--stage: only for a pipeline; give its number of stages, --pipeline 4"),
        (["--pipeline", "4"], "give the number of micro-batches of a step, --microbatches 8"),
        ([*PIPELINE, "--stage", "2"], "--stage 2 does not exist: the 2 stages are numbered 0 to 1"),
        (["--schedule", "gpipe"], "--schedule: only for a pipeline; give its number of stages"),
        ([*PIPELINE, "--microbatches", "1"], "as many micro-batches as stages: give 2 or more"),
        (["--pipeline", "1"], "invalid value '1': at least 2 expected, or auto"),
        (["--fsdp", "2", "--host", "1GB"], "--host: FSDP2 runs exported plans"),
        ([*AUTO, "--stage", "1"], "--stage 1 needs a fixed number of stages, not --pipeline auto"),
        (
            [*PIPELINE, "--fsdp", "2", "--fsdp-precision", "bfloat16"],
            "--fsdp-precision cannot be combined with --pipeline",
        ),
        (
            [*PIPELINE, "--fsdp", "2", "--fsdp-reshard", "yes"],
            "--fsdp-reshard yes: a stage of a pipeline keeps whole parameters; give no or auto",
        ),
        ([*PIPELINE, "--stage", "1", "--max-batch"], "with --pipeline with --stage"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, file, capsys) -> None:
    assert main(["--budget", "1MB", *words, file]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_of_layers_is_refused(file, capsys) -> None:
    assert main(["--budget", "1MB", *PIPELINE, f"{file}:not_layers"]) == 2
    error = capsys.readouterr().err
    assert "not_layers of" in error
    assert "returned a Linear; it must return the layers as a torch.nn.Sequential" in error
    words = ["--pipeline", "4", "--microbatches", "4", "--device", "cpu"]
    assert main(["--budget", "1MB", *words, file]) == 2
    assert "3 layers cannot be divided into 4 stages" in capsys.readouterr().err
