"""The GPU benchmark's code, on the CPU at small size, and what it needs to be installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from benchmarks.gpu import operators, smoke
from benchmarks.gpu.__main__ import _is_chosen, _parser, _run_case_in_process, main, table
from benchmarks.gpu.parts import PARTS, Settings
from benchmarks.gpu.picture import draw
from benchmarks.zoo import SMALL
from graphs.capture import is_random
from graphs.capture.as_eager import kernels as eager_kernels
from graphs.costs.real_calls import SEEDED_BACKWARD, with_real_seeds
from solver import solve
from tests.support.paths import ROOT

both_steps = importlib.import_module("scheduler_runtime.verifying.both_steps")
CPU = torch.device("cpu")
SETTINGS = Settings(CPU, backend="aot_eager", time_limit_s=600)


def run(part: str, case: str, earlier=None) -> dict:
    return PARTS[part].run(case, SETTINGS, earlier or {})


def test_every_case_of_a_part_has_a_name_of_its_own():
    for device in (CPU, torch.device("cuda")):
        for full in (False, True):
            for part in PARTS.values():
                cases = part.cases(Settings(device, full=full))
                assert cases
                assert len(set(cases)) == len(cases)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "way", ["eager", "every block", "every second block", "selective", "compile", "ours"]
)
def test_each_way_runs_and_less_is_held_where_blocks_are_checkpointed(way):
    plain = run("ways", "gpt2/eager")
    case = f"gpt2/{way}/0.6" if way == "ours" else f"gpt2/{way}"
    row = run("ways", case, {"gpt2/eager": plain})
    assert row["status"] == "ran", row
    assert row["samples_per_s"] > 0
    if way in ("every block", "every second block"):
        assert row["peak_bytes"] < plain["peak_bytes"]
    if way == "ours":
        assert row["peak_bytes"] <= row["budget_bytes"] < plain["peak_bytes"]


@pytest.mark.slow
def test_the_part_on_budgets_tells_whether_they_were_kept():
    row = run("budget", "unet/0.6")
    assert row["kept"], row
    assert row["plain_fails"], row
    assert row["peak_bytes"] <= row["budget_bytes"] < row["plain_peak_bytes"]


@pytest.mark.slow
def test_the_part_on_bits_compares_a_plan_that_recomputes():
    row = run("bits", "attention with dropout/ours")
    assert row["n_again"] > 0
    assert row["n_compared"] > 10
    assert row["different"] == []


@pytest.mark.slow
def test_the_largest_batch_lies_between_one_that_fits_and_one_that_does_not():
    row = run("batch", "gpt2/eager/4 MB")
    assert row["batch_size"] >= 1
    assert row["peak_bytes"] <= 4 * 10**6
    larger = run("batch", "gpt2/every block/4 MB")
    assert larger["batch_size"] > row["batch_size"]


@pytest.mark.slow
def test_costs_are_put_beside_the_roofline():
    row = operators.compare_with_roofline(SMALL["llama"], CPU)
    assert row["n_distinct"] > 10
    assert row["ratio"] == pytest.approx(row["measured_s"] / row["roofline_s"])
    assert "aten.mm.default" in row["operators"]


def test_the_command_goes_on_where_it_was_left(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--device", "cpu", "--in-process", "--parts", "host"]
    assert main([*options, "--minutes", "0"]) == 0
    assert "repeat the command to continue" in capsys.readouterr().out
    path = tmp_path / "gpu.json"
    found = json.loads(path.read_text())
    found["parts"]["host"]["cases"] = {
        case: {"status": "ran", "n_operators": 7} for case in PARTS["host"].cases(SETTINGS)
    }
    path.write_text(json.dumps(found))
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("| gpt2/ours | 7 |") == 1
    found["machine"]["torch"] = "0.1"
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="another machine"):
        main(options)


def test_a_case_that_fails_is_a_row_with_its_reason():
    shown = table("ways", {"gpt2/ours/0.1": {"status": "refused", "reason": "nothing fits"}})
    assert "refused: nothing fits" in shown


def test_without_a_gpu_the_command_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().out
    assert main(["--out", str(tmp_path), "--device", "mps"]) == 2


def test_all_ways_are_in_one_picture(tmp_path):
    row = {"status": "ran", "peak_bytes": 10**9, "samples_per_s": 5.0}
    refused = {"status": "refused"}
    cases = {"gpt2/eager": row, "gpt2/ours/0.5": row, "unet/compile": refused}
    assert [path.name for path in draw(cases, tmp_path)] == ["ways-gpt2.png"]
    assert (tmp_path / "ways-gpt2.png").stat().st_size > 10_000


WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split('.')[0] in {missing}:
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import torch
from scheduler_runtime import apply
import benchmarks.gpu.__main__
from benchmarks.zoo import SMALL
from solver import solve
model, batch = SMALL['gpt2'].model_and_batch(torch.device('cpu'))
free = solve(model, batch, budget='1GB')
resident = free.graph.resident_bytes
budget = resident + int(0.7 * (free.baseline.peak_bytes - resident))
solution = solve(model, batch, budget=budget)
assert solution.simulation.n_recomputed
apply(model, solution)
model(*batch).backward()
print('ran')
"""


@pytest.mark.slow
def test_what_the_gpu_machine_may_lack_is_not_needed():
    missing = ("rich", "pulp", "highspy", "transformers", "hypothesis")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip().endswith("ran"), done.stderr


@pytest.mark.slow
def test_the_smoke_part_runs_the_tests_of_a_file_and_keeps_their_findings(tmp_path):
    options = ["--parts", "smoke", "--only", "device", "--device", "cpu", "--backend", "aot_eager"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "gpu.json").read_text())["parts"]["smoke"]["cases"]["device"]
    assert row["status"] == "ran", row
    assert row["n_held"] == len(row["checks"]) >= 7
    assert f"torch {torch.__version__}" in row["checks"]["versions and card[cpu]"]


def test_a_check_that_fails_is_reported_and_the_next_one_runs(monkeypatch, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "def test_one():\n    raise RuntimeError('no kernel image')\n\n"
        "def test_other(record_property):\n    record_property('finding', '3 bytes')\n"
    )
    monkeypatch.setattr(smoke, "TESTS", tmp_path)
    assert smoke.groups(SETTINGS) == ["two"]
    row = smoke.run("two", CPU, "aot_eager")
    assert (row["n_held"], row["n_failed"], row["status"]) == (1, 1, "failed")
    assert row["reason"] == "one"
    assert "no kernel image" in row["checks"]["one"]
    assert row["checks"]["other"].endswith("3 bytes")


def test_cases_are_chosen_by_their_words():
    assert _is_chosen("gpt2/ours/0.5", None)
    assert _is_chosen("gpt2/ours/0.5", [["gpt2", "unet"], ["0.5"]])
    assert not _is_chosen("gpt2-xl/ours/0.5", [["gpt2"]])


@pytest.mark.slow
def test_a_case_that_hangs_or_ends_its_process_is_a_row(monkeypatch, tmp_path):
    arguments = _parser().parse_args(["--out", str(tmp_path), "--device", "cpu"])
    program = "import sys, {0}; sys.stdin.read(); {1}"
    for body, limit_s, words in (
        ("subprocess.Popen(['sleep', '600']); time.sleep(600)", 2.0, "not done within 2 s"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 120.0, "signal SIGSEGV"),
    ):
        script = tmp_path / "benchmarks" / "gpu.py"
        script.parent.mkdir(exist_ok=True)
        (script.parent / "__init__.py").touch()  # else the real package has precedence
        script.write_text(program.format("os, signal, subprocess, time", body))
        monkeypatch.chdir(tmp_path)
        row = _run_case_in_process("host", "gpt2/ours", {}, arguments, limit_s)
        assert row["status"] == "failed"
        assert words in row["reason"]


def test_the_seeds_of_attention_are_taken_from_where_they_are_made(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    x = torch.rand(2)
    for name in SEEDED_BACKWARD:
        operator = getattr(torch.ops.aten, name).default
        read = [a.name for a in operator._schema.arguments if not a.kwarg_only]
        given = {key: x.as_subclass(OnCuda) if key == "query" else object() for key in read}
        schema = getattr(torch.ops.aten, name.removesuffix("_backward")).default._schema
        made = {returned.name: object() for returned in schema.returns}
        forward = mock.Mock(_schema=schema, return_value=tuple(made.values()))
        packet = mock.Mock(default=forward)
        monkeypatch.setattr(torch.ops.aten, name.removesuffix("_backward"), packet)
        found = dict(zip(read, with_real_seeds(operator, tuple(given.values())), strict=True))
        in_flash = "flash" in name
        seed, offset = ("rng_state", "unused") if in_flash else ("philox_seed", "philox_offset")
        assert found == given | {"philox_seed": made[seed], "philox_offset": made[offset]}
        asked = ["query", "key", "value", "dropout_p", "is_causal"]
        asked += [] if in_flash else ["attn_bias"]
        options = {key: given[key] for key in asked}
        options |= {} if in_flash else {"compute_log_sumexp": True}
        assert forward.call_args == mock.call(**options)
    assert with_real_seeds(torch.ops.aten.add.Tensor, (x, x)) == (x, x)


def test_fused_attention_on_cuda_is_random_with_dropout_alone():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert not is_random(graph.call_function(flash, (x, x, x)))
    assert not is_random(graph.call_function(flash, (x, x, x, 0.0, True)))
    assert is_random(graph.call_function(flash, (x, x, x, 0.1, True)))
    assert is_random(graph.call_function(flash, (x, x, x), {"dropout_p": 0.1}))


def test_batch_norm_of_cudnn_is_planned_by_an_operator_that_tells_what_it_writes():
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)
    mean, variance = torch.zeros(3), torch.ones(3)
    plain = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, True, 0.1)
    own_mean, own_variance = torch.zeros(3), torch.ones(3)
    kernel = eager_kernels._eager_cudnn_batch_norm
    out = kernel(x, weight, bias, own_mean, own_variance, True, 0.1, 1e-5)
    assert torch.equal(out[0], plain)
    assert torch.equal(own_mean, mean)
    assert torch.equal(own_variance, variance)
    key = torch._C.DispatchKey.Autograd
    operator = torch.ops.aten.cudnn_batch_norm.default
    before = operator.py_kernels[key]
    with eager_kernels.eager_kernels(torch.device("cuda")):
        assert operator.py_kernels[key] is kernel
    assert operator.py_kernels[key] is before


@pytest.mark.slow
def test_what_differs_without_a_plan_as_well_is_told_apart(monkeypatch):
    made = lambda: SMALL["llama"].model_and_batch(CPU)  # noqa: E731
    model, batch = made()
    own, count = both_steps._Bench.results, iter(range(10))

    def bits(self):
        return {**own(self), "gradient of noise": torch.tensor(next(count))}

    monkeypatch.setattr(both_steps._Bench, "results", bits)
    found = both_steps.run_both_steps(
        solve(model, batch, budget="1GB", time_limit_s=600),
        model=lambda: made()[0],
        batch=lambda: made()[1],
        loss=None,
        inputs=None,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        device="cpu",
        autocast=None,
    )
    assert found.unsteady == ("gradient of noise",)
    assert found.differences == ()
