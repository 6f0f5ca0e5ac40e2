"""A model that cannot be traced is run on this machine: said first, and only where it can fit."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from checkpoint_solver.cli.memory_to_run import ModelSizes
from checkpoint_solver.cli.running_here import N_REAL_STEPS
from tests.support.command import failed, write_model

RUNS = """
import sys

def ran(x):
    if type(x) is torch.Tensor and x.device.type == "cpu":
        print("a real run", file=sys.stderr)
"""
IN_FORWARD = (
    "        return x.square().mean()",
    "        ran(x)\n        return x.square().mean() * (2 if x.sum().item() > 1e9 else 1)",
)
"""Of the model itself: no submodule can be one piece."""
DEEPER = (
    "nn.Linear(32, 32) for",
    "nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()) for",
)
PART = """
class Part(nn.Linear):
    def forward(self, x):
        ran(x)
        return super().forward(x) * (2 if x.sum().item() > 1e9 else 1)
"""
IN_A_PART = (
    ("        self.layers =", "        self.part = Part(32, 32)\n        self.layers ="),
    ("        return x.square().mean()", "        return self.part(x).square().mean()"),
)
ON_CPU = ("--device", "cpu", "--time-limit", "600")


@pytest.mark.slow
def test_real_steps_are_announced_with_what_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path, IN_FORWARD, DEEPER, add=RUNS)
    assert main(["--budget", "20MB", *ON_CPU, path]) == 0
    _, said, *runs = capsys.readouterr().err.splitlines()
    assert said.startswith("solve: not traced: ")
    assert f"Running at least {N_REAL_STEPS} real steps of the model here" in said
    # eight layers of 32 x 32 and 32 floats with their gradients, and 64 rows of 32 floats
    assert "parameters, gradients and batch take 75.78 KB, activations come on top" in said
    assert runs.count("a real run") == N_REAL_STEPS


def test_steps_that_cannot_fit_are_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphs.costs.free_bytes", lambda _device: 40e3)
    line = failed(
        capsys, "--budget", "20MB", *ON_CPU, write_model(tmp_path, IN_FORWARD, add=RUNS), code=4
    )
    assert "do not fit here: parameters, gradients and batch take 41.98 KB" in line
    assert line.endswith("40.00 KB of this machine's memory are free")


@pytest.mark.slow
def test_a_part_that_runs_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path, *IN_A_PART, add=RUNS + PART)
    assert main(["--budget", "20MB", *ON_CPU, path]) == 0
    first, *runs = capsys.readouterr().err.splitlines()
    assert first.startswith("solve: not traced: forward reads values that the step computes")
    assert "so that this part can run here and, if possible, be planned as one piece" in first
    assert "parameters and batch take 29.31 KB" in first
    assert set(runs) == {"a real run"}


@pytest.mark.slow
def test_why_a_part_is_not_planned_as_one_piece_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returns_its_input = PART.replace("return super().forward(x) * (2", "return x if (2").replace(
        "else 1)", "else 1) == 1 else super().forward(x)"
    )
    path = write_model(tmp_path, *IN_A_PART, add=RUNS + returns_its_input)
    main(["--budget", "20MB", *ON_CPU, path])
    err = capsys.readouterr().err
    assert "'part' cannot be planned as one piece: a tensor that it returns shares memory" in err


def test_a_part_that_cannot_fit_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphs.costs.free_bytes", lambda _device: 20e3)
    path = write_model(tmp_path, *IN_A_PART, add=RUNS + PART)
    line = failed(capsys, "--budget", "20MB", *ON_CPU, path, code=4)
    assert "real steps, to plan it by whole submodules, do not fit here" in line


def test_why_the_weights_cannot_be_built_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = """
        import pathlib

        def build():
            device = torch.empty(0).device.type
            with pathlib.Path(__file__).with_name("builds").open("a") as file:
                print(device, file=file)
            if device != "meta":
                raise MemoryError("no room for weights")
            return Net()
    """
    path = write_model(tmp_path, *IN_A_PART, ("    return Net()", "    return build()"))
    with Path(path).open("a") as file:
        file.write(RUNS + PART + textwrap.dedent(builds))
    line = failed(capsys, "--budget", "20MB", "--rewrites", "none", *ON_CPU, path, code=4)
    assert "forward reads values that the step computes" in line
    assert "; with its weights: " in line
    assert "MemoryError: no room for weights" in line
    assert (tmp_path / "builds").read_text().split() == ["meta", "cpu"]


def test_a_lazy_module_has_no_size_before_it_runs() -> None:
    import torch
    from torch import nn

    assert ModelSizes.of(nn.LazyLinear(2), torch.ones(1)) is None
    assert ModelSizes.of(nn.Linear(2, 2, bias=False), torch.ones(3)) == ModelSizes(28, 16)
