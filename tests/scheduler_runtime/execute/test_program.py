"""What a planned step costs the host beside its operators: names looked up, pieces handed over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scheduler_runtime import apply
from scheduler_runtime.execute.program import Program
from scheduler_runtime.execute.straight_line import LEAST_IN_PIECE
from solver import solve
from tests.support.bitwise import assert_same_gradients


class Tower(nn.Module):
    def __init__(self, n_layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def planned(gradients: str) -> tuple[nn.Module, nn.Module, torch.Tensor, Program]:
    """A planned model, its twin without a plan, a batch, and the program after its first step."""
    torch.manual_seed(0)
    model, batch = Tower(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    apply(model, solve(model, batch, budget="1GB", gradients=gradients, time_limit_s=600))
    for each in (model, twin):
        each(batch).backward()
    ((_, compiled),) = model.forward._programs.programs
    return model, twin, batch, compiled.program


@pytest.mark.slow
def test_detached_tensors_are_not_made_anew():
    *_, program = planned("fresh")
    codes = [piece.module.code for piece in (program.forward, *program.backward)]
    assert any("tanh_backward" in code for code in codes)
    assert not any("detach" in code for code in codes)


@pytest.mark.slow
def test_operators_are_called_by_names_of_their_own():
    *_, program = planned("fresh")
    codes = [piece.module.code for piece in (program.forward, *program.backward)]
    assert all("torch.ops" not in code for code in codes)
    assert any("aten_mm_default(" in code for code in codes)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("gradients", ["fresh", "accumulate"])
def test_gradients_leave_together_where_they_are_held_to_the_end_anyhow(gradients):
    model, twin, batch, program = planned(gradients)
    n_leaves = len(list(model.parameters()))
    handed = [len(piece.gradients) for piece in program.backward]
    assert sum(handed) == n_leaves
    if gradients == "accumulate":  # each is added up and gone before the next is made
        assert max(handed) <= 2
    else:
        assert 1 < len(handed) < n_leaves / 2
        for piece in program.backward[:-1]:
            calls = [n for n in piece.module.graph.nodes if n.op == "call_function"]
            assert len(calls) >= LEAST_IN_PIECE
    for each in (model, twin):
        each(batch).backward()
    assert_same_gradients(model, twin)
