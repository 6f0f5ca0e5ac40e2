"""A model that fails by itself is not said to be untraceable, and nothing else is said to fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from graphs.capture import FailsOnBatchError
from graphs.trace import TraceError
from solver import solve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Conv2d(3, 4, 3)


class OneRow(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x[:1])).sum()


class WrongView(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(3, -1).sum()


class WrongChannels(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.linear(x)[None, None]).sum()


class Missing(Model):
    def forward(self, x: torch.Tensor) -> Any:
        return self.nothing_of_this_name(x)


class UsesNumpy(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.sum() * float(y.detach().numpy().max())


class Branches(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sum()
        return y if y.item() > 0 else 2 * y


class WithFlexAttention(Model):
    """A higher-order operator, for which tracing has no rule; running it needs none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            q = x.view(1, 1, 8, 4)
            z = flex_attention(q, q, q)
        return (y * z.view(8, 4)).sum()


X = torch.randn(8, 4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(5, 5), nn.ReLU()), r"RuntimeError: .*8, 4"),
        (OneRow(), "ValueError: Expected more than 1 value per channel"),
        (WrongView(), r"RuntimeError: shape .*test_own_failure.py, line"),
        (WrongChannels(), "RuntimeError: Given groups=1"),
        (Missing(), "AttributeError: .*nothing_of_this_name"),
    ],
)
def test_a_model_that_fails_by_itself(
    model: nn.Module, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(FailsOnBatchError, match=f"fails on this batch: {reason}") as caught:
        solve(model, (X,), budget="6MB", loss=lambda output, _: output.sum())
    assert "submodules" not in str(caught.value)
    assert not getattr(caught.value, "__notes__", [])
    assert "Traceback" not in capfd.readouterr().err
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


class Product(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.linear.weight).sum()


class Norm(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


@pytest.mark.parametrize(
    ("model", "operator"),
    [(nn.Linear(4, 4), "addmm"), (Product(), "mm"), (Norm(), "batch_norm")],
)
def test_a_model_that_fails_on_another_dtype(model: nn.Module, operator: str) -> None:
    batch = X.double()
    with pytest.raises(RuntimeError):
        model(batch)
    reason = f"fails on this batch: MixedDtypesError: {operator} takes tensors of one dtype"
    with pytest.raises(FailsOnBatchError, match=reason) as caught:
        solve(model, (batch,), budget="6MB", loss=lambda output, _: output.sum())
    assert "submodules" not in str(caught.value)


@pytest.mark.parametrize("model", [UsesNumpy(), Branches(), WithFlexAttention()])
def test_a_model_that_only_a_trace_cannot_run(model: nn.Module) -> None:
    model(X)
    with pytest.raises(TraceError, match="cannot be traced") as caught:
        solve(model, (X,), budget="6MB")
    assert not isinstance(caught.value, FailsOnBatchError)
    assert "by its submodules" in str(caught.value)
    assert ".." not in str(caught.value)
