"""An exported plan beneath torch.compile, PEFT, DDP and FSDP2: the same bits, less memory."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from graphs.costs.memory_events import cpu_peak_bytes
from graphs.trace import trace
from scheduler_runtime.execute.torch_checkpoint import CountMismatchError
from scheduler_runtime.export import ExportError, to_torch_checkpoint
from scheduler_runtime.measuring import measure
from solver import solve
from solver.module_checkpointing.regions import CheckpointRegion, nodes_of
from solver.reporting.report_data import step_notes
from tests.scheduler_runtime.export.test_export import planned, put, small_gpt2, tokens
from tests.support.bitwise import assert_equal, one_step
from tests.support.paths import INSTALLED, ROOT
from tests.support.tiny_transformers import tiny_llama


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_compile_takes_whole_and_selective_checkpoints(dropout: float) -> None:
    """aot_eager runs eager's operators, so the bits are eager's."""
    plain, batch = small_gpt2(dropout), tokens()
    model = copy.deepcopy(plain)
    graph = trace(model, batch)
    nodes = [nodes_of(graph, f"blocks.{i}") for i in range(3)]
    saved = frozenset(n for n in nodes[0] if "attention" in graph.node_by_name[n].op)
    put(
        model,
        graph,
        [
            CheckpointRegion(nodes[0], modules=("blocks.0",), saved=saved),
            CheckpointRegion(nodes[1], modules=("blocks.1",)),
        ],
    )
    compiled = [torch.compile(m, backend="aot_eager", fullgraph=True) for m in (plain, model)]
    assert_equal(*(one_step(each, batch, 3) for each in compiled))
    peaks = [cpu_peak_bytes(lambda m=m: m(*batch).backward()).peak_bytes for m in compiled]
    assert peaks[1] < peaks[0]


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


def sentences() -> dict[str, torch.Tensor]:
    ids = torch.arange(4 * 32).reshape(4, 32) % 64
    return {"input_ids": ids, "labels": ids}


def assert_same_bits_in_less_memory(plain: nn.Module, model: nn.Module) -> int:
    """Returns the measured peak."""
    batch = sentences()
    assert_equal(one_step(plain, batch, 3), one_step(model, batch, 3))
    peaks = [measure(copy.deepcopy(m), batch, n_steps=1).peak_bytes for m in (plain, model)]
    assert peaks[1] < peaks[0]
    return peaks[1]


@pytest.mark.slow
def test_a_model_that_fills_a_cache_is_refused_until_the_cache_is_off() -> None:
    model = tiny_llama(n_layers=3, use_cache=False).train()
    solution = planned(trace(model, sentences()), 0.5)
    model.config.use_cache = True
    with pytest.raises(ExportError, match=r"set model\.config\.use_cache = False"):
        to_torch_checkpoint(model, solution)
    model.config.use_cache = False
    assert to_torch_checkpoint(model, solution).modules


def test_the_cache_of_a_part_is_told_with_its_path() -> None:
    model = nn.ModuleDict({"encoder": tiny_llama(n_layers=1)}).train()
    model.forward = lambda ids: model["encoder"](input_ids=ids, labels=ids).loss
    solution = solve(model, sentences()["input_ids"], budget="1GB")
    with pytest.raises(ExportError, match=r"set model\.encoder\.config\.use_cache = False"):
        to_torch_checkpoint(model, solution)


@pytest.mark.slow
def test_an_encoder_that_fills_no_cache_is_exported_with_the_cache_on() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    plain = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=3, use_cache=True)).train()
    model = copy.deepcopy(plain)
    assert model.config.use_cache
    solution = planned(trace(model, sentences()), 0.5)
    assert not any("use_cache" in note for note in step_notes(solution.graph))
    assert to_torch_checkpoint(model, solution).modules
    assert_same_bits_in_less_memory(plain, model)


@pytest.mark.slow
def test_peft_and_then_export() -> None:
    model = get_peft_model(tiny_llama(n_layers=3, use_cache=False), LORA).train()
    plain = copy.deepcopy(model)
    plan = to_torch_checkpoint(model, planned(trace(model, sentences()), 0.5))
    assert assert_same_bits_in_less_memory(plain, model) <= plan.peak_bytes


def test_peft_after_an_export_works_for_whole_checkpoints_and_else_says_so() -> None:
    plain = tiny_llama(n_layers=3, use_cache=False).train()
    graph = trace(plain, sentences())
    nodes = nodes_of(graph, "model.layers.1")
    whole, selective = copy.deepcopy(plain), copy.deepcopy(plain)
    put(whole, graph, [CheckpointRegion(nodes, modules=("model.layers.1",))])
    products = frozenset(n for n in nodes if graph.node_by_name[n].op == "aten.mm.default")
    put(selective, graph, [CheckpointRegion(nodes, modules=("model.layers.1",), saved=products)])
    adapted = []
    for each in (plain, whole, selective):
        torch.manual_seed(1)
        adapted.append(get_peft_model(each, copy.deepcopy(LORA)).train())
    assert_same_bits_in_less_memory(adapted[0], adapted[1])
    with pytest.raises(
        CountMismatchError, match=r"called aten\.mm\.default 11 times, but the plan expects 7"
    ):
        one_step(adapted[2], sentences(), 3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("example", "launch"),
    [
        ("export_ddp", ()),
        ("export_fsdp2", ("-m", "torch.distributed.run", "--nproc-per-node", "2")),
    ],
)
def test_two_processes_train_with_the_same_bits(
    example: str, launch: tuple[str, ...], tmp_path: Path
) -> None:
    for package in INSTALLED:  # as installed: no `examples`
        (tmp_path / package).symlink_to(ROOT / package)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, f"examples/integrations/{example}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    same = r"rank \d: losses and gradients are the same bits; the step took (\d+) bytes without "
    found = re.findall(same + r"and (\d+) with checkpointing", done.stdout)
    assert len(found) == 2
    assert all(int(exported_bytes) < int(plain_bytes) for plain_bytes, exported_bytes in found)
    told = re.findall(r"rank \d: (\d+) bytes predicted, (\d+) measured", done.stdout)
    assert len(told) == (2 if example == "export_fsdp2" else 0)
    assert all(int(measured) <= int(predicted) for predicted, measured in told)
