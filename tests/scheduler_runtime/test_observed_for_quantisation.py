"""Models under quantisation-aware training (torch.ao): observers write buffers in each step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization

from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from solver import solve


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantised = quantization.QuantStub()
        blocks = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.quantised(x)).pow(2).mean()


def _observed() -> nn.Module:
    model = _Model().train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    with pytest.warns(DeprecationWarning, match="torch.ao.quantization is deprecated"):
        return quantization.prepare_qat(model)


@pytest.mark.slow
def test_losses_weights_and_observers_are_those_of_eager_mode() -> None:
    planned, batches = _observed(), torch.randn(3, 512, 8).unbind()
    planned(batches[0])
    eager = copy.deepcopy(planned)
    solution = solve(planned, batches[0], budget="520KB")
    assert solution.simulation.n_recomputed
    apply(planned, solution)
    for batch in batches:
        losses = []
        for model in (planned, eager):
            model.zero_grad()
            losses.append(model(batch))
            losses[-1].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        assert torch.equal(*losses)
        for name, value in eager.state_dict().items():
            assert torch.equal(planned.state_dict()[name], value), name


def test_observers_without_sizes_are_refused_and_stay_as_they_are() -> None:
    model = _observed()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match="Call the model once before it is planned"):
        trace(model, torch.randn(4, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
