"""The command `solve` on model files: what is taken from them, and how they can fail."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from tests.support.command import MODEL, failed, json_of

PLAN = ("--budget", "1MB", "--device", "cpu")


def test_a_model_file_is_traced_and_planned(model_file, tmp_path, capsys):
    schedule = str(tmp_path / "s.json")
    path = model_file()
    assert main([*PLAN, "-o", schedule, path]) == 0
    out = capsys.readouterr().out
    assert "(Net)" in out
    assert "generic CPU" in out
    assert "roofline" in out
    assert json.loads(Path(schedule).read_text())["environment"]["shapes"] == [[64, 32]]


def test_autocast_is_part_of_the_step(model_file, tmp_path):
    schedule = tmp_path / "s.json"
    assert main([*PLAN, "--autocast", "bf16", "--quiet", "-o", str(schedule), model_file()]) == 0
    assert json.loads(schedule.read_text())["environment"]["autocast"] == "bfloat16"


def test_accumulated_gradients_are_there_from_the_start(model_file, capsys):
    baseline = json_of(capsys, *PLAN, "--accumulate", model_file())["baseline"]
    assert baseline["memory_bytes"]["gradients"] >= baseline["memory_bytes"]["parameters"]


def test_sizes_reach_the_functions_that_take_them(model_file, capsys):
    path = model_file(
        ("def get_model():", "def get_model(seq_length=7):\n    assert seq_length == 9")
    )
    assert (
        json_of(capsys, *PLAN, "--batch-size", "16", "--seq-length", "9", path)["baseline"][
            "memory_bytes"
        ]["batch"]
        == 16 * 32 * 4
    )


def test_a_size_that_nobody_takes_is_wrong_usage(model_file, capsys):
    line = failed(capsys, *PLAN, "--seq-length", "9", model_file(), code=2)
    assert "--seq-length 9 has no effect: neither get_model nor get_batch" in line


def test_a_size_that_is_needed_is_wrong_usage(model_file, capsys):
    path = model_file(("batch_size=64", "batch_size"))
    assert "needs batch_size: give --batch-size" in failed(capsys, *PLAN, path, code=2)


def test_another_factory_and_a_loss_outside(model_file, capsys):
    add = """
    def small():
        return nn.Linear(32, 2)

    def get_loss(output, batch):
        return output.mean()

    def get_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
    """
    path = model_file(add=add)
    report = json_of(capsys, *PLAN, f"{path}:small")
    assert report["problem"].endswith("model.py:small (Linear)")
    assert report["baseline"]["memory_bytes"]["optimizer"] == 0  # SGD keeps nothing


SUPERVISED = """
    def get_model():
        return nn.Linear(32, 2)

    def get_batch(batch_size=64):
        return torch.randn(batch_size, 32), torch.randint(2, (batch_size,))

    def get_loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])
"""
INPUTS = """
    def get_inputs(batch):
        return batch[0]
"""


def test_targets_are_for_the_loss(model_file, capsys):
    report = json_of(capsys, *PLAN, "--verify", model_file(add=SUPERVISED + INPUTS))
    assert report["baseline"]["memory_bytes"]["batch"] == 64 * 32 * 4 + 64 * 8
    assert report["verification"]["passed"]
    assert len(report["verification"]["times_s"]) == 3


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("batch['x']", "tuple indices must be integers"), ("None", "get_inputs(batch) returned None")],
)
def test_get_inputs_that_fails_is_told_in_one_line(model_file, capsys, wrong, reason):
    path = model_file(add=SUPERVISED + INPUTS.replace("batch[0]", wrong))
    line = failed(capsys, *PLAN, path, code=4)
    assert reason in line
    assert f"{path}, line " in line


def test_targets_without_get_inputs_are_told_what_to_write(model_file, capsys):
    path = model_file(add=SUPERVISED)
    line = failed(capsys, *PLAN, path, code=4)
    assert "Linear.forward" in line
    assert "get_inputs(batch)" in line


@pytest.mark.slow
def test_a_loss_that_only_picks_the_models_own_is_inside(model_file, capsys):
    changes = ("return x.square().mean()", "return {'loss': x.square().mean(), 'n': 3}")
    add = """
    def get_loss(output, batch):
        return output['loss']
    """
    first, second = (
        json_of(capsys, *PLAN, path)["schedule"]
        for path in (model_file(changes), model_file(changes, add=add))
    )
    assert first == second


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the working directory: `net` defines get_model, `other` make_other."""
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("")
    text = textwrap.dedent(MODEL)
    (tmp_path / "some_package" / "net.py").write_text(text)
    (tmp_path / "some_package" / "other.py").write_text(text.replace("get_model", "make_other"))
    (tmp_path / "some_package.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("source", ["net", "net:get_model", "other:make_other"])
def test_a_module_to_import(package, source):
    assert main([*PLAN, "--quiet", f"some_package.{source}"]) == 0
    assert str(package) not in sys.path


def test_a_module_without_get_model_is_told_to_name_its_factory(package, capsys):
    line = failed(capsys, *PLAN, "some_package.other", code=4)
    assert "add the function that creates the model: some_package.other:factory" in line
    assert "make_other" in line


def test_a_file_of_another_kind_is_no_module(package, capsys):
    assert "expected model.py" in failed(capsys, *PLAN, "some_package.txt", code=4)


def test_what_a_model_file_prints_stays_out_of_the_report(model_file, capsys):
    path = model_file(("return Net()", "print('hello'); return Net()"), add="print('loading')")
    assert main([*PLAN, "--json", path]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "loading" in printed.err
    assert "hello" in printed.err


def test_no_weights_are_allocated(model_file):
    path = model_file(("32", "500000"))  # four layers of a terabyte each
    assert main(["--budget", "40TB", "--device", "cpu", "--quiet", path]) == 0


def test_a_model_that_reads_values_is_built_for_real(model_file, capsys):
    path = model_file(("return Net()", "assert torch.ones(2).sum().item() == 2; return Net()"))
    assert main([*PLAN, path]) == 0
    assert "The model was built in real memory" in capsys.readouterr().out


def test_a_batch_that_cannot_be_on_the_meta_device_needs_no_note(model_file, capsys):
    path = model_file(
        ("return torch.randn(", "assert torch.ones(2).nonzero().numel(); return torch.randn(")
    )
    assert main([*PLAN, path]) == 0
    assert "built in real memory" not in capsys.readouterr().out


def test_a_card_that_is_not_here_is_a_forecast(model_file, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--budget", "2%", "--device", "h100", model_file()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA H100 80 GB SXM" in out
    assert "750.0 MB" in out
    assert "a forecast for NVIDIA H100" in out
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in out


def test_cuda_that_is_not_here_is_wrong_usage(model_file, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = failed(capsys, "--budget", "1GB", "--device", "cuda", model_file(), code=2)
    assert "no CUDA device is available" in line


def test_measured_costs_are_of_this_machine(model_file, capsys):
    options = ("--budget", "1GB", "--costs", "measured")
    line = failed(capsys, *options, "--device", "h100", model_file(), code=2)
    assert "cannot be measured for 'h100'" in line
    costs = json_of(capsys, *options, "--device", "cpu", model_file())["costs"]
    assert costs.startswith("measured")
    assert "times the roofline's" in costs


@pytest.mark.slow(sample=8)
@pytest.mark.parametrize(
    ("changes", "add", "reason"),
    [
        ((("def get_model():", "def get_model(:"),), "", "line 15: SyntaxError"),
        ((("def get_model", "def make_model"),), "", "defines no get_model(); a model file"),
        ((("def get_batch", "def make_batch"),), "", "defines no get_batch(); a model file"),
        ((), "raise RuntimeError('at import')", "line 21: RuntimeError: at import"),
        ((), "import sys; sys.exit(3)", "line 21: called sys.exit(3)"),
        (
            (("return Net()", "return 5"),),
            "",
            "line 15: get_model() returned an object of type int",
        ),
        ((("return Net()", "return None"),), "", "get_model() returned None"),
        ((("return Net()", "return 1 / 0"),), "", "line 16: ZeroDivisionError"),
        ((("return Net()", "import nothing_there"),), "", "No module named 'nothing_there'"),
        ((("get_model()", "get_model(width)"),), "", "get_model requires an argument 'width'"),
        ((("return torch.randn", "torch.randn"),), "", "get_batch() returned None"),
        ((("torch.randn(batch_size, 32)", "1 / 0"),), "", "line 19: ZeroDivisionError"),
        ((("(batch_size, 32)", "(batch_size, 31)"),), "", "get_batch() returned float32[64, 31]"),
        ((("x.square().mean()", "x.square()"),), "", "define get_loss(output, batch)"),
        ((("x.square().mean()", "x.argmax()"),), "", "the loss must be one floating-point number"),
        ((("x.square().mean()", "x.mean().detach()"),), "", "does not depend on any parameter"),
        ((("x.square().mean()", "x.mean().item()"),), "", "model.py, line 13"),
        ((), "get_loss = 5", "get_loss is an object of type int; it must be a function"),
        ((), "def get_optimizer(model): pass", "get_optimizer(model) returned None"),
        (
            (),
            "def get_optimizer(model): return torch.optim.SGD(model.parameters(), lr=-1)",
            "ValueError: Invalid learning rate: -1 (in get_optimizer)",
        ),
        (
            (),
            "def get_optimizer(parameters): return torch.optim.AdamW(parameters)",
            "it is called with the model, whose parameters are model.parameters()",
        ),
    ],
)
def test_a_model_file_that_fails(changes, add, reason, model_file, capsys):
    path = model_file(*changes, add="\n" + add if add else "")
    line = failed(capsys, *PLAN, "--quiet", path, code=4)
    assert reason in line
    assert "model.py" in line


def test_the_largest_batch_of_a_file_without_a_batch(model_file, capsys):
    path = model_file(("def get_batch", "def make_batch"))
    line = failed(capsys, *PLAN, "--max-batch", path, code=4)
    assert "defines no get_batch(); a model file" in line


@pytest.mark.slow
def test_the_search_for_the_largest_batch_where_the_model_refuses_one_sample(model_file, capsys):
    normed = (("self.layers =", "self.norm = nn.BatchNorm1d(32); self.layers ="),)
    path = model_file(*normed, ("return x.square()", "return self.norm(x).square()"))
    options = ["--budget", "200kB", "--device", "cpu", "--json", "--method", "every_block"]
    assert main([*options, "--max-batch", path]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    (note,) = [note for note in answer["notes"] if "The search began with batch size 64" in note]
    assert "with batch size 1 the model itself fails" in note
    assert "Expected more than 1 value per channel" in note
    assert "submodules" not in printed.out + printed.err
    assert "weights" not in printed.err
    line = failed(capsys, *options, "--max-batch", "--batch-size", "1", path, code=4)
    assert "Net fails on this batch: ValueError: Expected more than 1 value" in line
    assert "submodules" not in line


def test_a_file_that_is_no_python(tmp_path, capsys):
    path = tmp_path / "model.py"
    path.write_bytes(bytes(range(256)))
    line = failed(capsys, *PLAN, str(path), code=4)
    assert line.startswith(f"solve: {path}")


READS_ITS_MASK = (
    ("return x.square().mean()", "return (x if mask.all() else x * mask[:, None]).square().mean()"),
    ("forward(self, x)", "forward(self, x, mask)"),
)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["torch.ones(64)", "(torch.rand(64) > 0.5).float()"])
def test_a_model_that_reads_its_batch_is_planned_for_the_values_that_it_has(
    mask, model_file, capsys
):
    batch = "return torch.randn(batch_size, 32)"
    path = model_file(*READS_ITS_MASK, (batch, f"{batch}, {mask}"))
    answer = json_of(capsys, *PLAN, "--verify", path)
    assert answer["verification"]["passed"]
    assert answer["n_ops"] > 20
    assert any("forward reads values of " in note for note in answer["notes"])


def test_a_batch_too_large_to_build_is_planned_without_its_values(model_file, capsys, monkeypatch):
    monkeypatch.setattr("checkpoint_solver.cli.traced_step.MOST_BATCH_BYTES", 0)
    assert main([*PLAN, model_file()]) == 0
    assert "was not allocated" in capsys.readouterr().out
