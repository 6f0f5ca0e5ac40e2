"""Two sides of a comparison are measured in turns, and one model runs both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.execute import without_plans
from scheduler_runtime.measuring import measure_in_turns
from solver import solve


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def test_sides_take_turns():
    ran = []

    @contextlib.contextmanager
    def side(name: str) -> Iterator[None]:
        ran.append(name)
        yield

    model, batch = Mlp(), torch.randn(2, 8)
    found = measure_in_turns(
        model, batch, [lambda: side("plain"), lambda: side("planned")], n_steps=2
    )
    assert ran == ["plain", "planned"] * 4  # one to warm up, two timed, one for memory
    assert len(found) == 2


def test_a_model_runs_without_its_plan_and_keeps_the_programs():
    model, batch = Mlp(), torch.randn(2, 8)
    apply(model, solve(trace(model, batch), budget="1GB"))
    model(batch)
    planned = model.forward
    programs = list(planned._programs.programs)
    with without_plans(model):
        assert "forward" not in vars(model)
        model(batch)
    assert model.forward is planned
    assert planned._programs.programs == programs
