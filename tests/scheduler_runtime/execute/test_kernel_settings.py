"""Settings of kernels between the forward and the backward pass."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.trace import trace
from scheduler_runtime import apply
from solver.schedule.recompute import baseline, keep
from tests.support.bitwise import assert_same_gradients, solution_of


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x))).square().mean()


def planned(model: nn.Module, x: torch.Tensor, *, recomputes: bool) -> nn.Module:
    graph = trace(model, x, rewrites=())
    schedule = keep(graph, set()) if recomputes else baseline(graph)
    return apply(model, solution_of(graph, schedule))


def without_mkldnn() -> contextlib.AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


def test_a_recomputation_with_other_kernels_is_refused() -> None:
    """It would give other bits. With the same setting, the backward pass can still run."""
    plain, x = Convolutions(), torch.randn(4, 1, 12, 12)
    model = planned(copy.deepcopy(plain), x, recomputes=True)
    with without_mkldnn():
        loss, of_plain = model(x), plain(x)
    words = r"mkldnn\.enabled was False in the forward pass and is True in the backward pass"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    with without_mkldnn():
        loss.backward()
        of_plain.backward()
    assert_same_gradients(plain, model)


def test_without_recomputation_settings_may_change() -> None:
    plain, x = Convolutions(), torch.randn(4, 1, 12, 12)
    model = planned(copy.deepcopy(plain), x, recomputes=False)
    for each in (plain, model):
        with without_mkldnn():
            loss = each(x)
        loss.backward()
    assert_same_gradients(plain, model)
