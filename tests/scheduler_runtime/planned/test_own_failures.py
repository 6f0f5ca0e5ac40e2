"""What the module's own forward raises on a batch, a planned module raises as well."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

from graphs.trace import TraceError
from scheduler_runtime import apply, fit
from solver import solve


class BadBatchError(Exception):
    pass


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2:
            raise BadBatchError("odd batch")
        return self.layer(x).sum()


def _fitted(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    return fit(model, budget="10MB")


def _applied(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    return apply(model, solve(model, batch, budget="10MB", loss=lambda output, _: output.sum()))


ODD, NARROW = torch.randn(3, 8), torch.randn(4, 7)
EXPECTED = {
    "its own exception": (Picky(), ODD, BadBatchError),
    "a wrong shape": (Picky(), NARROW, RuntimeError),
    "a wrong dtype": (Picky(), torch.randn(2, 8).double(), RuntimeError),
    "batch norm of one row": (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        ODD[:1],
        ValueError,
    ),
}


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("planned", [_fitted, _applied])
@pytest.mark.parametrize("name", EXPECTED)
def test_an_error_of_the_module_keeps_its_type(planned, name: str) -> None:
    model, bad, error = EXPECTED[name]
    good = torch.randn(4, 8)
    with pytest.raises(error) as plain:
        model(bad)
    planned(model, good)
    try:
        for batch in (good, bad, good):
            if batch is bad:
                with pytest.raises(error) as caught:
                    model(batch)
                assert not {"TraceError", "PlanMismatchError"} & {
                    each.__name__ for each in type(caught.value).__mro__
                }
                assert f"forward of {type(model).__name__} itself" in caught.value.__notes__[-1]
                assert str(caught.value) == str(plain.value)
            else:
                model(batch).sum().backward()
    finally:
        del model.forward


class FailsLate(nn.Module):
    """It has advanced all that it has when it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = (
            nn.BatchNorm1d(8),
            nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)),
        )

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = self.layers(F.dropout(self.norm(x), 0.1))
        if scale.min() <= 0:
            raise BadBatchError("scale is not positive")
        return distributions.Normal(y * scale, scale, validate_args=True).rsample().square().mean()


class LeavesChecking(FailsLate):
    """The check of torch.distributions fails."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = self.layers(F.dropout(self.norm(x), 0.1))
        return distributions.Normal(y, scale, validate_args=True).rsample().square().mean()


X, SCALE = torch.randn(16, 8), torch.ones(16, 8)
LATE = {
    "its own exception": (FailsLate, -SCALE, BadBatchError),
    "a wrong shape": (FailsLate, SCALE[:, :7], RuntimeError),
    "a check of torch.distributions": (LeavesChecking, -SCALE, ValueError),
}


def _trained(
    model: nn.Module, bad: torch.Tensor, error: type[Exception], *, bad_at: int
) -> list[Any]:
    """The state after each of three steps, with a bad batch that is skipped before one of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    found: list[Any] = []
    for step in range(3):
        if step == bad_at:
            with pytest.raises(error) as caught:
                model(X, bad)
            found += [str(caught.value), torch.get_rng_state().tolist()]
            found.append([each.tolist() for each in model.buffers()])
        model.zero_grad()
        model(X, SCALE).backward()
        optimizer.step()
        found += [each.tolist() for each in (*model.parameters(), *model.buffers())]
        found.append(torch.get_rng_state().tolist())
    return found


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("bad_at", [0, 1])
@pytest.mark.parametrize("name", LATE)
def test_training_goes_on_with_the_same_bits_after_a_skipped_batch(name: str, bad_at: int) -> None:
    kind, bad, error = LATE[name]
    torch.manual_seed(1)
    plain = kind()
    fitted = fit(copy.deepcopy(plain), budget="10MB")
    expected = _trained(plain, bad, error, bad_at=bad_at)
    assert _trained(fitted, bad, error, bad_at=bad_at) == expected


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", LATE)
def test_no_error_of_a_trace_waits_for_the_garbage_collector(name: str) -> None:
    kind, bad, error = LATE[name]
    model = fit(kind(), budget="10MB")
    model(X, SCALE).backward()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(error):
            model(X, bad)
        left = [each for each in gc.get_objects() if type(each) in (error, TraceError)]
        assert left == []
    finally:
        gc.enable()


def test_its_own_error_comes_where_forward_without_a_plan_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unplanned(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    model = fit(FailsLate(), budget="10MB")
    monkeypatch.setattr(model.forward, "unplanned", unplanned)
    with pytest.raises(BadBatchError, match="scale is not positive"):
        model(X, -SCALE)
