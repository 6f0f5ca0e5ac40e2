"""Plans for a named card that is not in this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from checkpoint_solver.cli import main
from graphs.capture import can_trace_absent
from scheduler_runtime import PlanMismatchError, apply
from solver import solve
from solver.device_and_costs import find_target
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not can_trace_absent(),
    reason="planning for a card that is absent: a card is here, or PyTorch lacks fake CUDA tensors",
)
MODEL_FILE = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).float().mean()

def get_model():
    return Net()

def get_batch():
    return torch.randn(2, 16, 64)
"""


class Net(nn.Linear):
    def forward(self, x):
        return functional.dropout(super().forward(x)).square().mean()


def test_a_named_card_is_traced_for_cuda():
    target = find_target("h100")
    assert (target.torch_device, target.local_device) == ("cuda", "cpu")
    assert "No card is in this machine" in target.notes[0]
    here = find_target("h100", runs_here=True)
    assert (here.torch_device, here.local_device) == ("cpu", "cpu")
    assert "runs here" in here.notes[0]
    assert find_target("cpu").notes == ()


def test_a_build_without_fake_cuda_tensors_traces_on_the_cpu(monkeypatch):
    monkeypatch.setattr("graphs.capture.can_trace_absent", lambda: False)
    target = find_target("h100")
    assert target.torch_device == "cpu"
    assert "no fake CUDA tensors" in target.notes[0]


def test_apply_on_the_cpu_refuses_a_plan_for_cuda_or_plans_anew():
    model, batch = Net(16, 16), torch.randn(4, 16)
    solution = solve(model, batch, budget="2GB", device="h100")
    assert solution.environment["device"] == "cuda"
    apply(model, solution)
    with pytest.raises(PlanMismatchError, match="device: cpu, planned for cuda"):
        model(batch)
    again = Net(16, 16)
    apply(again, solution, on_mismatch="replan")
    again(batch).backward()
    assert again.weight.grad is not None


AFTER_A_TRACE = """
import os
import torch
from torch import nn
from graphs.costs import Roofline
from graphs.hardware import named
from graphs.trace import trace

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

def step():
    Net(8, 8)(torch.randn(4, 8)).backward()

trace(Net(8, 8), torch.randn(4, 8), device="cuda", costs=Roofline(named("h100")))
step()
child = os.fork()
if child == 0:
    try:
        step()
    except BaseException:
        os._exit(1)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_process_that_has_traced_for_a_card_can_be_forked_and_train():
    """Autograd has started no thread for a device."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_TRACE], cwd=ROOT, timeout=600)
    assert done.returncode == 0


def planned(tmp_path, *options: str) -> dict:
    (tmp_path / "model.py").write_text(MODEL_FILE)
    out = tmp_path / "graph.json"
    given = ["--budget", "2GB", "--device", "h100", "--graph-out", str(out), *options]
    assert main([*given, str(tmp_path / "model.py")]) == 0
    return json.loads(out.read_text())


def test_the_command_plans_for_the_operators_of_the_card(tmp_path, capsys):
    graph = planned(tmp_path, "--autocast", "bf16", "--budget-of", "reserved")
    operators = [node["op"] for node in graph["nodes"]]
    assert "aten._scaled_dot_product_cudnn_attention.default" in operators
    assert graph["meta"]["environment"]["autocast"] == "bfloat16"
    shown = " ".join(capsys.readouterr().out.split())
    assert "No card is in this machine" in shown
    reserved = r"reserved .* by PyTorch's allocator \(.* with expandable_segments:True; simulated\)"
    assert re.search(reserved + r"; [0-9.]+ MB if the card has no more memory than", shown)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 50_000)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x), target)


def test_a_chunked_loss_is_traced_for_a_card():
    batch = torch.randn(1024, 8), torch.randint(50_000, (1024,))
    solution = solve(Classifier(), batch, budget="2GB", device="h100")
    assert solution.graph.meta.environment["device"] == "cuda"


@pytest.mark.slow
def test_what_is_verified_is_traced_on_the_cpu(tmp_path, capsys):
    graph = planned(tmp_path, "--verify")
    operators = [node["op"] for node in graph["nodes"]]
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in operators
    assert "Traced on the CPU" in " ".join(capsys.readouterr().out.split())
