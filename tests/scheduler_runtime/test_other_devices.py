"""MPS and XPU are refused wherever a plan begins, with the same reason."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from graphs.model_calls.call import TraceError
from scheduler_runtime import apply, fit
from scheduler_runtime.by_submodule import planning as fallback
from scheduler_runtime.planned import forward as stand_in
from solver import solve
from solver.sizes_deadlines_progress.sizes import CUDA_RESERVE_BYTES


class Loss(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    return Loss(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)


class OnAnother(Loss):
    """Says that its parameters are on another device, or are on the CPU."""

    where = "mps"

    def parameters(self, recurse: bool = True):
        for parameter in super().parameters(recurse):
            yield _Elsewhere(parameter, self.where)


class _Elsewhere:
    def __init__(self, parameter: torch.Tensor, where: str) -> None:
        self._parameter = parameter
        self.device = torch.device(where)

    def __getattr__(self, name: str):
        return getattr(self._parameter, name)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_applying_and_fitting_on_another_device_is_refused(kind, monkeypatch):
    model, batch = model_and_batch()
    solution = solve(model, batch, budget="1GB", time_limit_s=600)
    apply(model, solution)
    for module in (stand_in, __import__("sys").modules["scheduler_runtime.fitting.planning_part"]):
        monkeypatch.setattr(module, "device_of", lambda _model: torch.device(kind))
    with pytest.raises(TraceError, match=f"the step is on {kind}; .*cpu and cuda only"):
        model(batch)
    other, _ = model_and_batch()
    fit(other, budget="1GB")
    with pytest.raises(TraceError, match=f"the step is on {kind}; .*cpu and cuda only"):
        other(batch)


def test_planning_by_submodules_on_another_device_is_refused():
    model = OnAnother(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(fallback.FallbackError, match="on mps; real steps can be measured on cpu"):
        fallback.plan_chain(model, torch.randn(2, 4), budget="1GB")


def test_planning_by_submodules_on_a_card_leaves_the_reserve(monkeypatch):
    class SeenError(Exception):
        pass

    finish_measuring: list[int] = []

    def noted(_step, request):
        finish_measuring.append(request.reserve_bytes)
        raise SeenError

    monkeypatch.setattr(fallback, "answer", noted)
    monkeypatch.setattr(fallback, "_unseen_bytes", lambda *_: 0)
    for name in ("find_sequences", "observe"):
        monkeypatch.setattr(fallback, name, lambda *_, **__: ("a", "b"))
    for name in ("find_loop", "coarse_graph"):
        monkeypatch.setattr(fallback, name, lambda *_, **__: None)
    monkeypatch.setattr(fallback, "ObservedStep", lambda *_, **__: SeenStep())
    for where, reserve in (("cuda:0", None), ("cuda:0", 5), ("cpu", None)):
        model = OnAnother(nn.Linear(4, 4))
        model.where = where
        with contextlib.suppress(SeenError):
            fallback.plan_chain(model, torch.randn(2, 4), budget="1GB", reserve=reserve)
    assert finish_measuring == [CUDA_RESERVE_BYTES, 5, 0]


class SeenStep:
    forward = None
    release = None

    def changed_state(self):
        return contextlib.nullcontext(())
