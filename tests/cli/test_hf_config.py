"""`solve hf:config.json`: what is built from a Hugging Face configuration, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config, ViTConfig

from checkpoint_solver.cli import hf_config
from checkpoint_solver.cli.command import main
from checkpoint_solver.cli.hf_config import ConfigurationError
from checkpoint_solver.cli.model_file import open_model_file
from checkpoint_solver.cli.model_source import parse_source
from tests.support.command import failed

LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=32,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=0,
)
GPT2 = GPT2Config(
    n_embd=32,
    n_head=2,
    n_layer=2,
    vocab_size=96,
    n_positions=32,
    architectures=["GPT2LMHeadModel"],
    bos_token_id=0,
    eos_token_id=0,
)
ENCODER = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}
BERT = BertConfig(
    **ENCODER, vocab_size=96, max_position_embeddings=32, architectures=["BertForMaskedLM"]
)
VIT = ViTConfig(**ENCODER, image_size=32, patch_size=8, architectures=["ViTForImageClassification"])
OPTIONS = ["--device", "cpu", "--json"]
TEXT = ["--batch-size", "2", "--seq-length", "16"]
N_PIXELS = 3 * 32 * 32


def written(directory: Path, configuration: Any, **changes: Any) -> str:
    """The configuration as config.json; returns `hf:` and its path."""
    value = {**configuration.to_dict(), **changes}
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))
    return f"hf:{path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "sizes", "batch_bytes", "dtype", "verify"),
    [
        (LLAMA, TEXT, 3 * 2 * 16 * 8, "bfloat16", []),
        (GPT2, TEXT, 3 * 2 * 16 * 8, "float32", ["--verify"]),
        (BERT, TEXT, 3 * 2 * 16 * 8, "float32", []),
        (VIT, ["--batch-size", "4"], 4 * (N_PIXELS * 4 + 8), "float32", []),
    ],
    ids=["llama", "gpt2", "bert", "vit"],
)
def test_a_configuration_is_planned(
    tmp_path, capsys, configuration, sizes, batch_bytes, dtype, verify
):
    problem = written(tmp_path, configuration)
    assert main(["--budget", "1GB", *OPTIONS, *sizes, *verify, problem]) == 0
    report = json.loads(capsys.readouterr().out)
    model = built(problem)
    parameters = list(model.parameters())
    n_bytes = sum(p.numel() * p.element_size() for p in parameters)
    notes = " ".join(report["notes"])
    memory = report["baseline"]["memory_bytes"]
    assert report["problem"].endswith(f"({configuration.architectures[0]})")
    assert {str(p.dtype) for p in parameters} == {f"torch.{dtype}"}
    assert memory["parameters"] == n_bytes
    assert memory["optimizer"] >= 2 * n_bytes  # AdamW's two moments, and its steps
    assert memory["batch"] == batch_bytes
    assert f"parameters in {dtype}" in notes
    assert "AdamW" in notes
    if verify:
        assert report["verification"]["passed"]


def built(problem: str) -> torch.nn.Module:
    with torch.device("meta"):
        model = hf_config.load(Path(problem.removeprefix("hf:"))).module.get_model()
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.slow
def test_a_plan_of_a_configuration_recomputes(tmp_path, capsys):
    problem = written(tmp_path, GPT2)
    assert main(["--budget", "1GB", *OPTIONS, *TEXT, problem]) == 0
    plain = json.loads(capsys.readouterr().out)["baseline"]
    budget = str(int(0.9 * plain["peak_bytes"]))
    assert main(["--budget", budget, *OPTIONS, *TEXT, "--time-limit", "600", problem]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schedule"]["n_recomputed"] > 0
    assert report["schedule"]["peak_bytes"] <= int(budget)


def test_only_the_loss_is_returned(tmp_path):
    source = parse_source(written(tmp_path, GPT2))
    assert source is not None
    with open_model_file(source, sizes={"batch_size": 2, "seq_length": 8}) as file:
        loss = file.model()(**file.batch())
    assert isinstance(loss, torch.Tensor)
    assert loss.shape == ()


@pytest.mark.parametrize(
    ("configuration", "architectures", "taken"),
    [
        (LLAMA, ["LlamaModel"], "LlamaForCausalLM"),
        (VIT, None, "ViTForImageClassification"),
        (BERT, ["BertForTokenClassification"], "BertForTokenClassification"),
        (
            T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=96),
            ["T5ForConditionalGeneration"],
            "T5ForConditionalGeneration",
        ),
    ],
)
def test_the_class_follows_the_architectures(tmp_path, configuration, architectures, taken):
    problem = written(tmp_path, configuration, architectures=architectures)
    loaded = hf_config.load(Path(problem.removeprefix("hf:")))
    assert loaded.title == taken
    assert any(f"Using {taken}" in note for note in loaded.notes) == (architectures != [taken])


def test_a_directory_is_taken_for_its_config(tmp_path):
    problem = written(tmp_path, VIT)
    source = parse_source(f"hf:{tmp_path}")
    assert str(source) == problem
    assert hf_config.load(source.place).title == "ViTForImageClassification"


@pytest.mark.slow
def test_the_largest_batch_of_a_configuration(tmp_path, capsys):
    problem = written(tmp_path, VIT)
    assert main(["--budget", "450KB", "--max-batch", "--method", "sqrt", *OPTIONS, problem]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["largest"] >= 1
    assert len(sizes["candidates"]) > 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "give --batch-size"),
        (["--batch-size", "2"], "give --seq-length"),
        ([*TEXT[:3], "64"], "--seq-length 64 exceeds max_position_embeddings=32"),
    ],
)
def test_sizes_that_are_missing_or_too_large(tmp_path, capsys, sizes, words):
    assert words in failed(capsys, "--budget", "1GB", *sizes, written(tmp_path, BERT), code=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": ...}, "cannot read it"),
        ({"model_type": "no-such-model"}, "cannot read it"),
        ({"architectures": ["BertForNextSentencePrediction"]}, "BertForMaskedLM"),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, changes, words):
    problem = written(tmp_path, BERT, **changes)
    with pytest.raises(ConfigurationError, match=words):
        hf_config.load(Path(problem.removeprefix("hf:")))


def test_a_missing_file_and_a_forgotten_prefix_are_told(tmp_path, capsys):
    line = failed(capsys, "--budget", "1GB", f"hf:{tmp_path}/none.json", code=4)
    assert "no such file; give a local config.json" in line
    path = written(tmp_path, VIT).removeprefix("hf:")
    assert f"write hf:{path}" in failed(capsys, "--budget", "1GB", path, code=4)


@pytest.mark.slow
def test_the_longest_sequence_is_that_of_one_sample_and_within_the_table(tmp_path, capsys):
    problem = written(tmp_path, GPT2, n_layer=1)
    options = ("--budget", "1GB", "--max-seq", "--seq-length", "16", *OPTIONS)
    assert main([*options, problem]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problem"].endswith("(GPT2LMHeadModel, seq length 32, batch size 1)")
    assert any("exceeds max_position_embeddings=32" in note for note in report["notes"])
    assert not any("table of positions may be shorter" in note for note in report["notes"])


@pytest.mark.slow
def test_without_the_library_the_way_out_is_named(tmp_path):
    problem = written(tmp_path, VIT)
    program = (
        "import sys; sys.modules['transformers'] = None; from checkpoint_solver.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--budget", "1GB", "--batch-size", "1", problem],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 4
    assert "pip install transformers" in done.stderr
    assert "Traceback" not in done.stderr
