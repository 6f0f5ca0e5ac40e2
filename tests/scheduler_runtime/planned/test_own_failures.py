"""What the module's own forward raises on a batch, a planned module raises as well."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
                if error is not RuntimeError:  # kernels on tensors without values word it otherwise
                    assert str(caught.value) == str(plain.value)
            else:
                model(batch).sum().backward()
    finally:
        del model.forward
