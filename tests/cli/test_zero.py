"""`--zero`: the command plans for a rank of DeepSpeed's ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from tests.support.command import json_of

FILE = """
import torch
from torch import nn

def get_model(dtype=torch.float32):
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(dtype)

def get_batch(batch_size=64):
    return torch.zeros(batch_size, 32)

def get_loss(output, batch):
    return output.square().mean()

def get_optimizer(model):
    return torch.optim.Adam(model.parameters())
"""
N_ELEMENTS = 4 * (32 * 32 + 32)
WORDS = ["--device", "cpu", "--quiet"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "linears.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1500}}))
    return str(path)


def answer(capsys: Any, *words: str) -> dict[str, Any]:
    return json_of(capsys, *WORDS, *words)


@pytest.mark.slow
def test_the_plan_of_a_rank_holds_what_the_engine_does(file, config, tmp_path, capsys) -> None:
    graph = str(tmp_path / "graph.json")
    asked = ["--budget", "1MB", "--graph-out", graph, file]
    answer(capsys, *asked)
    plain = Graph.load(graph).resident_bytes
    ranks = {}
    for stage in (1, 2, 3):
        zero = ["--zero", str(stage), "--ranks", "4", "--ds-config", config]
        assert f"per rank of 4, ZeRO-{stage}" in str(answer(capsys, *zero, *asked)["notes"])
        ranks[stage] = Graph.load(graph).resident_bytes
    state = [12 * N_ELEMENTS // 4 - 8 * N_ELEMENTS, 4 * 1500]  # with a copy; buckets
    steps = 4 * (1 - 8)  # one count for the part in place of one for each parameter
    assert ranks[1] == plain + sum(state) + steps
    assert ranks[2] == ranks[1] + 4 * N_ELEMENTS // 4
    # a part of the parameters beside whole ones and two buffers for them, and no copy of gradients
    # in the bucket; the part's state and gradients are as large as in stage 2
    assert ranks[3] >= ranks[2] + 4 * N_ELEMENTS * 2


@pytest.mark.slow
def test_the_largest_batch_is_that_of_a_rank(file, config, capsys) -> None:
    asked = ["--max-batch", "--budget", "200KB", file]
    of_rank = ["--zero", "2", "--ranks", "4", "--ds-config", config, *asked]
    of_one, alone = (answer(capsys, *words)["sizes"]["largest"] for words in (of_rank, asked))
    assert of_one > alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2"], "--ranks: only for DeepSpeed's ZeRO; give its stage"),
        (["--zero", "2"], "--zero 2: give the number of ranks"),
        (["--zero", "2", "--ranks", "2", "--fsdp", "2"], "--fsdp cannot be combined with --zero"),
        (["--zero", "1", "--ranks", "2", "--verify"], "cannot be combined with --zero"),
        (["--zero", "1", "--ranks", "2", "--ds-config", "no.json"], "--ds-config no.json"),
        # an input: a folder in which nothing can be written will do
        (["--zero", "1", "--ranks", "2", "--ds-config", "/proc/version"], "not valid JSON"),
    ],
)
def test_what_is_not_planned_is_refused(words: list[str], message: str, file, capsys) -> None:
    assert main(["--budget", "1MB", *WORDS, *words, file]) == 2
    assert message in capsys.readouterr().err
