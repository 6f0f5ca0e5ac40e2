"""Reasons that `fit` gives name what it is about, and it plans no more often than it has to."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.model_calls import TraceError
from scheduler_runtime import fit, plans_of
from solver import solve


def fitted(model: nn.Module, budget: int | str = "1GB") -> nn.Module:
    return fit(model, budget=budget, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings about plans."""
    caplog.set_level(logging.INFO, logger="checkpoint_solver")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


class _SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": y.square().mean(), "norm": y.norm()}


def test_gradients_of_other_outputs_take_two_plans_and_blame_nothing(warned: Any) -> None:
    model = fitted(_SeveralOutputs())
    for _ in range(3):
        output = model(torch.randn(16, 8))
        (output["loss"] + 0.1 * output["norm"]).backward()
        model.zero_grad()
    assert len(plans_of(model)) == 2
    assert warned() == []


AGAIN = "so the step is planned again, for this run and for later ones"


class _Similarities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.tower(x)
        return {"logits": self.scale * y @ y.T, "scale": self.scale.exp()}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_loss_that_reads_one_output_is_named_as_the_reason(
    caplog: pytest.LogCaptureFixture, is_transposed: bool
) -> None:
    """The remedy is not given where the layout of the gradient takes another plan all the same."""
    caplog.set_level(logging.INFO, logger="checkpoint_solver")
    model, y = fitted(_Similarities()), torch.arange(16)
    logits = model(torch.randn(16, 8))["logits"]
    F.cross_entropy(logits.t() if is_transposed else logits, y).backward()
    (line,) = [r.getMessage() for r in caplog.records if "gradients arrive" in r.getMessage()]
    remedy = ". Remedy: say which outputs the loss reads, fit(..., loss_outputs=...)"
    assert line == (
        "_Similarities: gradients arrive for output['logits'], planned for output['logits'], "
        f"output['scale'], {AGAIN}{'' if is_transposed else remedy}"
    )


def test_another_layout_of_a_gradient_is_named_as_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="checkpoint_solver")
    model = fitted(nn.Linear(8, 16))
    F.cross_entropy(model(torch.randn(16, 8)).t(), torch.arange(16)).backward()
    line = f"Linear: the gradient of output arrives in another memory layout than planned, {AGAIN}"
    assert line in [r.getMessage() for r in caplog.records]


def test_a_setting_that_has_changed_is_named(warned: Any) -> None:
    model = fitted(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    for p in (0.1, 0.3):
        model[1].p = p
        model(torch.randn(16, 8)).sum().backward()
        model.zero_grad()
    torch.use_deterministic_algorithms(True)
    try:
        model(torch.randn(16, 8)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    of_attribute, of_torch = warned()
    assert of_attribute.endswith(": attribute 'p' of module '1' is 0.3, planned for 0.1")
    assert of_torch.endswith(": torch.use_deterministic_algorithms has changed")


def test_a_parameter_changed_before_backward_is_named() -> None:
    model = fitted(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    loss = model(torch.randn(16, 8)).mean()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter '2\.weight' was changed in place"):
        loss.backward()


def test_a_batch_on_the_meta_device_is_refused_before_planning(warned: Any) -> None:
    model, x = nn.Linear(8, 8), torch.randn(16, 8, device="meta")
    words = "argument input is on the meta device, and the parameters of Linear are on cpu"
    fitted(model)
    with pytest.raises(TraceError, match=words):
        model(x)
    assert plans_of(model) == ()
    model(torch.randn(16, 8)).sum().backward()
    assert len(plans_of(model)) == 1
    assert warned() == []


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [each for _ in range(4) for each in (nn.Linear(16, 64), nn.Tanh())]
        self.layers = nn.ModuleList(
            nn.Sequential(*layers[2 * i : 2 * i + 2], nn.Linear(64, 16)) for i in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.mean(1)[:4]


@pytest.mark.slow
def test_what_is_small_beside_the_budget_is_not_worth_another_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="checkpoint_solver")
    model, x = _Deep(), torch.randn(512, 16)
    plain = solve(model, x, budget="1GB", loss=lambda output, _: output.sum())
    fitted(model, int(0.8 * plain.baseline.peak_bytes))
    for _ in range(3):
        output = model(x)  # held: dropping it is worth a plan
        output.sum().backward()
        model.zero_grad()
    (plan,) = plans_of(model)
    assert plan.solution.overhead
    assert plan.solution.simulation.peak_bytes <= plan.solution.request.available_bytes
    assert not any("planned again, since the loss" in r.getMessage() for r in caplog.records)


class _MaskedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = y >= 0
        return F.cross_entropy(self.head(self.layer(x)[chosen]), y[chosen])


@pytest.mark.slow
def test_a_number_of_chosen_rows_is_called_so_with_a_remedy(warned: Any) -> None:
    model = fitted(_MaskedModel())
    for n in (3, 5, 6):
        y = torch.where(torch.arange(16) < n, 1, -1)
        model(torch.randn(16, 8), y).backward()
        model.zero_grad()
    first, second = warned()
    reason = "argument y has other values than when planned: forward chooses {} rows by them"
    assert reason.format(5) in first
    assert reason.format(6) in second
    assert "ignore_index" in first
    assert "ignore_index" not in second  # given once
