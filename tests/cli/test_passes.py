"""`--passes`: the command plans for several forward passes before one backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from solver import Solution

FILE = """
import torch
from torch import nn

def get_model():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers)

def get_batch(batch_size=64):
    return torch.randn(batch_size, 16)

def get_loss(output, batch):
    return output.square().mean()
"""
PASSES = ["--passes", "3", "--device", "cpu"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.slow
def test_the_report_names_them_and_the_files_have_them(file, tmp_path, capsys) -> None:
    assert main(["--budget", "190kB", *PASSES, file]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 forward passes wait for one backward pass" in printed
    assert "for backward per pass in flight" in printed
    schedule, graph = tmp_path / "schedule.json", tmp_path / "graph.json"
    words = ["--json", "-o", str(schedule), "--graph-out", str(graph)]
    assert main(["--budget", "190kB", *PASSES, *words, file]) == 0
    assert '"n_in_flight": 3' in capsys.readouterr().out
    saved = Solution.load(schedule, graph=graph)
    assert saved.simulation.peak_bytes <= 190_000 < saved.baseline.peak_bytes
    assert saved.environment["passes"]["n"] == saved.graph.n_in_flight == 3
    assert "3 forward passes wait for one backward pass" in repr(saved)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--passes", "2", "--verify"], "--verify cannot be combined with --passes"),
        (["--passes", "2", "--fsdp", "2"], "--fsdp cannot be combined with --passes"),
        (["--passes", "2", "--host", "1GB"], "--host cannot be combined with --passes"),
        (
            ["--passes", "2", "--pipeline", "2", "--microbatches", "4"],
            "--passes cannot be combined with --pipeline",
        ),
    ],
)
def test_what_is_for_one_pass_is_refused(words: list[str], message: str, file, capsys) -> None:
    assert main(["--budget", "1MB", "--device", "cpu", *words, file]) == 2
    assert message in capsys.readouterr().err
