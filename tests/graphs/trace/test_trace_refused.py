"""What cannot be traced, or would not be what a planned step does, is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from graphs.trace import TraceError, trace
from solver.solving import solve
from tests.graphs.trace.test_trace import _Several
from tests.support.models import TiedLanguageModel


class _Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _DataDependent(_Wrong):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x.sum() if x.sum() > 0 else x.mean()


class _Opaque(_Wrong):
    def forward(self, x: torch.Tensor) -> object:
        return _Box(self.layer(x).sum())


class _OpaqueInside(_Wrong):
    def forward(self, x: torch.Tensor) -> object:
        return {"mean": (x, _Box(self.layer(x).sum()))}


class _Box:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _Counts(_Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return self.layer(x).sum()


class _Remembers(_Counts):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x) if self.last is None else self.layer(x) + self.last.detach()
        return self.last.sum()


class _Replaces(_Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean).sum()


class _Logs(_Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.seen = {"steps": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).sum()
        self.losses.append(loss.detach())
        return loss


class _CountsInside(_Logs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["steps"][0] += 1
        return self.layer(x).sum()


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Counts(), "changes the attribute 'n_calls' of '_Counts'"),
        (_Remembers(), "changes the attribute 'last' of '_Remembers'"),
        (_Logs(), "changes the attribute 'losses' of '_Logs'"),
        (_CountsInside(), "changes the attribute 'seen' of '_CountsInside'"),
        (_Replaces(), "replaces buffer 'mean' by another tensor"),
    ],
)
def test_what_a_planned_step_would_not_do_is_refused(model: nn.Module, message: str) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    lists = copy.deepcopy([getattr(model, name, None) for name in ("losses", "seen")])
    for loss in (None, lambda output, _: output):
        with pytest.raises(TraceError, match=message):
            trace(model, torch.zeros(2, 4), loss=loss)
        assert before == [dict(vars(module)) for module in model.modules()]
        assert lists == [getattr(model, name, None) for name in ("losses", "seen")]


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(TraceError, match=r"a sparse tensor \(sparse_coo\), .* sparse=False in"):
        trace(model, torch.tensor([1, 2, 2]), loss=lambda output, _: output.sum())


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            _Wrong(),
            torch.zeros(2, 4),
            r"the loss must be one floating-point number; .*\(loss=lambda output, batch: \.\.\.\)",
        ),
        (_Wrong(), torch.zeros(2, 5), "_Wrong fails on this batch"),
        (_DataDependent(), torch.zeros(2, 4), "_DataDependent cannot be traced"),
        (_Opaque(), torch.zeros(2, 4), "of type _Box, which hides its tensors"),
        (
            _OpaqueInside(),
            torch.zeros(2, 4),
            r"of type _Box \(output\['mean'\]\[1\]\), which hides",
        ),
        (_Wrong(), {"y": torch.zeros(2, 4)}, "missing a required argument"),
        (_Wrong(), DataLoader([1]), r"is a DataLoader; give one of its batches: next\(iter"),
    ],
)
def test_what_cannot_be_traced_is_said(model: nn.Module, batch: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        trace(model, batch)
    assert "\n" not in str(caught.value)


def test_a_frozen_model_has_no_loss_to_differentiate() -> None:
    model = TiedLanguageModel().requires_grad_(False)
    with pytest.raises(TraceError, match="does not depend on any parameter"):
        trace(model, model.batch())


def test_cuda_is_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("the refusal is for machines without CUDA, and this one has a CUDA device")
    model = TiedLanguageModel()
    with pytest.raises(TraceError, match="no CUDA device is available"):
        trace(model, model.batch(), device="cuda")


def test_unknown_gradient_mode() -> None:
    model = TiedLanguageModel()
    with pytest.raises(ValueError, match="fresh, accumulate"):
        trace(model, model.batch(), gradients="summed")


def _raises(_output: Any, _batch: Any) -> Any:
    raise AssertionError("not today")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda output, _: output["y"],
            r"one floating-point number; .*shape \(3, 1\)",
        ),
        (lambda output, _: output["fixed"], "does not depend on any parameter"),
        (lambda _, batch: batch, "one floating-point number"),
        (lambda _output, _batch: None, "returned an object of type NoneType"),
        (
            lambda output, _: output["loss"].item(),
            r"^the loss function <lambda> cannot be traced \(",
        ),
        (_raises, r"^the loss function _raises fails on this batch: .*not today \(.*line"),
    ],
)
def test_a_loss_function_that_gives_no_loss_is_refused(loss: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace(_Several(), torch.ones(3, 4), loss=loss)


@pytest.mark.slow
def test_what_would_be_traced_in_the_modules_place_is_refused() -> None:
    from scheduler_runtime import apply, remove

    batch = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0), nn.Linear(32, 1))
    solution = solve(model, batch, budget="1GB")
    with pytest.raises(TraceError, match="the module is compiled"):
        solve(torch.compile(model), batch, budget="1GB")
    apply(model, solution)
    with pytest.raises(TraceError, match=r"has a plan already.*remove"):
        solve(model, batch, budget="1GB")
    remove(model)
    assert solve(model, batch, budget="1GB").simulation is not None


class _Eigenvalues(_Wrong):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + torch.linalg.eigvals(self.layer.weight).abs().sum()


def test_a_gradient_of_eigenvalues_is_refused_at_the_line_that_asks_for_them() -> None:
    message = r"\(.*test_trace_refused.py, line \d+\): the gradient of torch.linalg.eig.*submodule"
    with pytest.raises(TraceError, match=message):
        trace(_Eigenvalues(), torch.randn(2, 4))


class _SpectralRadius(_Wrong):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            radius = torch.linalg.eigvals(self.layer.weight).abs().max()
        return (self.layer(x) / radius).sum()


def test_eigenvalues_that_get_no_gradient_are_traced() -> None:
    graph = trace(_SpectralRadius(), torch.randn(2, 4))
    assert "aten.linalg_eig.default" in {node.op for node in graph.nodes}
    assert "opaque" not in graph.meta.environment


class _Spectrum(nn.Module):
    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eig(matrix)
        return values.abs() + vectors.abs().sum(-1)


class _WithSpectrum(_Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = _Spectrum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + self.spectrum(self.layer.weight).sum()


@pytest.mark.slow
def test_a_submodule_that_asks_for_eigenvalues_is_one_piece() -> None:
    graph = trace(_WithSpectrum(), torch.randn(2, 4))
    assert [each["module"] for each in graph.meta.environment["opaque"]] == ["spectrum"]
