"""`--tensor`: the command plans for one rank of the mesh that a model file distributes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint_solver.cli.command import main

FILE = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

def get_model():
    return nn.Sequential(Block(), Block())

def get_batch(batch_size=64):
    return torch.zeros(batch_size, 16)

def get_loss(output, batch):
    return output.square().mean()
"""
STYLES = """
def parallelize(model, mesh):
    assert mesh.mesh_dim_names == ("tp",)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""
PARAMETER_BYTES = 2 * (64 * 16 + 64 + 64 * 16 + 16) * 4
SPLIT_BYTES = 2 * ((64 * 16 + 64 + 64 * 16) // 2 + 16) * 4
WORDS = ["--budget", "1MB", "--device", "cpu", "--json"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "blocks.py"
    path.write_text(FILE + STYLES)
    return str(path)


def answer(capsys: Any, *words: str) -> dict[str, Any]:
    assert main([*WORDS, *words]) == 0
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


def parameter_bytes(report: dict[str, Any]) -> int:
    return int(report["baseline"]["memory_bytes"]["parameters"])


@pytest.mark.slow
def test_a_rank_holds_its_part(file: str, capsys: Any) -> None:
    report = answer(capsys, "--tensor", "2", file)
    assert parameter_bytes(report) == SPLIT_BYTES
    assert "of one rank of tensor parallelism" in str(report["notes"])
    assert parameter_bytes(answer(capsys, file)) == PARAMETER_BYTES


@pytest.mark.slow
def test_with_fsdp_each_part_is_split_again(file: str, tmp_path: Path, capsys: Any) -> None:
    graphs = {}
    for n_ranks in ("0", "2"):
        graphs[n_ranks] = tmp_path / f"{n_ranks}.json"
        tensor = ["--tensor", n_ranks] if n_ranks != "0" else []
        answer(capsys, "--fsdp", "4", *tensor, "--graph-out", str(graphs[n_ranks]), file)

    def resident_bytes(path: Path) -> int:
        from graphs.graph import Graph

        return sum(t.size_bytes for t in Graph.load(path).resident if t.kind == "parameter")

    assert resident_bytes(graphs["0"]) == PARAMETER_BYTES // 4
    assert resident_bytes(graphs["2"]) == SPLIT_BYTES // 4


@pytest.mark.slow
def test_the_largest_batch_of_a_rank(file: str, capsys: Any) -> None:
    quick = ["--max-batch", "--method", "sqrt", "--rewrites", "none", "--batch-size", "200"]
    whole = answer(capsys, *quick, file)["sizes"]["largest"]
    split = answer(capsys, *quick, "--tensor", "2", file)["sizes"]["largest"]
    assert split > whole > 200


@pytest.mark.slow
def test_a_rank_of_a_stage_holds_its_part(file: str, capsys: Any) -> None:
    stages = ["--pipeline", "2", "--microbatches", "2", "--tensor", "2"]
    assert parameter_bytes(answer(capsys, *stages, file)) == SPLIT_BYTES // 2
    # sharded over two more ranks, it has its part whole for all micro-batches, and a shard of it
    both = parameter_bytes(answer(capsys, *stages, "--fsdp", "2", file))
    assert both == SPLIT_BYTES // 2 + SPLIT_BYTES // 4


@pytest.mark.parametrize(
    ("words", "styles", "code", "message"),
    [
        (["--tensor", "3"], STYLES, 2, "--tensor 3: dimension 0 of 0.up.weight has size 64, which"),
        (["--tensor", "2"], "", 4, "for --tensor it defines parallelize(model, mesh)"),
        (
            ["--tensor", "2"],
            "def parallelize(model, mesh):\n    pass",
            4,
            "parallelize(model, mesh) has distributed no parameter",
        ),
        (
            ["--tensor", "2"],
            "def parallelize(model, mesh):\n    return 3",
            4,
            "returned an object of type int; it must return a torch.nn.Module or None",
        ),
        (["--tensor", "2", "--verify"], STYLES, 2, "--verify runs the step in one process"),
        (["--tensor", "1"], STYLES, 2, "at least 2 expected"),
        (
            ["--tensor", "3", "--pipeline", "2", "--microbatches", "2"],
            STYLES,
            2,
            "--tensor 3: dimension 0 of",
        ),
    ],
)
def test_what_cannot_be_planned(
    words: list[str], styles: str, code: int, message: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "blocks.py"
    path.write_text(FILE + styles)
    assert main([*WORDS, *words, str(path)]) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not dist.is_initialized()


LLAMA = """
from examples import llama
from examples.llama import parallelize

def get_model():
    sizes = dict(n_layers=1, width=64, mlp_width=128, n_heads=4, n_kv_heads=2, n_tokens=256)
    return llama.get_model(**sizes)

def get_batch(batch_size=2, seq_length=64):
    return llama.get_batch(batch_size, seq_length, 256)
"""


@pytest.mark.slow
def test_a_vocabulary_split_over_the_ranks(tmp_path: Path, capsys: Any) -> None:
    """Its lookup is masked; a trace for the card that is given up leaves no mask behind."""
    path = tmp_path / "small_llama.py"
    path.write_text(LLAMA)
    whole_words = ["--budget", "80MB", "--device", "h100", "--reserve", "0", str(path)]
    whole, split = answer(capsys, *whole_words), answer(capsys, "--tensor", "2", *whole_words)
    assert parameter_bytes(whole) / 2 < parameter_bytes(split) < 0.51 * parameter_bytes(whole)


@pytest.mark.exhaustive
def test_the_longest_sequence_of_a_rank(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "small_llama.py"
    path.write_text(LLAMA)
    words = ["--budget", "3MB", "--max-seq", "--method", "sqrt", "--rewrites", "none", str(path)]
    whole = answer(capsys, *words)["sizes"]["largest"]
    assert answer(capsys, *words, "--tensor", "2")["sizes"]["largest"] > whole > 0


@pytest.mark.exhaustive
def test_the_largest_micro_batch_of_a_rank_of_a_stage(file: str, capsys: Any) -> None:
    words = ["--pipeline", "2", "--microbatches", "2", "--max-batch", "--method", "sqrt"]
    words += ["--rewrites", "none", "--batch-size", "200", file]
    whole = answer(capsys, *words)["sizes"]["largest"]
    assert answer(capsys, *words, "--tensor", "2")["sizes"]["largest"] > whole > 200
