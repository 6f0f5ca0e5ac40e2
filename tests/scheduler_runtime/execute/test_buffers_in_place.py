"""Statistics of batch norms and counters are written by their operators, with eager mode's bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.same_bits import solution_of
from graphs.trace import trace
from scheduler_runtime import apply
from solver.schedule import baseline, keep
from tests.support.bitwise import assert_equal, assert_same_gradients


class Normed(nn.Module):
    """Two batch norms; shared: they are one."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.first = nn.BatchNorm2d(4)
        self.second = self.first if shared else nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.up(x)).relu()
        return self.second(self.down(x)).square().mean()


class Reading(Normed):
    """Reads the statistics, before and after they change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.first.running_mean.sum()
        return super().forward(x) + before + self.first.running_var.sum()


def batch(n: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(n))


def planned(model: nn.Module, *, recomputes: bool) -> nn.Module:
    graph = trace(model, batch(0))
    return apply(model, solution_of(graph, keep(graph, ()) if recomputes else baseline(graph)))


def code_of(model: nn.Module, *, recomputes: bool) -> str:
    """Of the planned step."""
    planned(model, recomputes=recomputes)
    model(batch(0)).backward()
    (_, bound) = model.forward._programs.programs[0]
    pieces = (bound.program.forward, *bound.program.backward)
    return "\n".join(piece.module.code for piece in pieces)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("make", [Normed, lambda: Normed(shared=True), Reading])
def test_buffers_and_gradients_are_those_of_eager_mode(make, recomputes: bool) -> None:
    model, plain = make(), make()
    planned(model, recomputes=recomputes)
    for n in range(3):
        losses = [each(batch(n)) for each in (model, plain)]
        assert torch.equal(*losses)
        assert_equal(model.buffers(), plain.buffers())
        for loss in losses:
            loss.backward()
    assert_same_gradients(model, plain)


def test_nothing_is_copied() -> None:
    code = code_of(Normed(), recomputes=False)
    assert "copy_" not in code
    assert code.count("_native_batch_norm_legit_default(") == 2
    assert code.count("add__Tensor(") == 2


def test_recomputation_leaves_the_statistics() -> None:
    code = code_of(Normed(), recomputes=True)
    assert code.count("_native_batch_norm_legit_default(") == 2
    assert code.count("_native_batch_norm_legit_functional_default(") == 2


def test_what_is_read_elsewhere_is_copied_at_the_end() -> None:
    code = code_of(Reading(), recomputes=False)
    assert code.count("_native_batch_norm_legit_functional_default(") == 1
    assert code.count("copy__default(") == 2


def test_another_forward_pass_may_come_before_the_backward_pass() -> None:
    model, plain = Normed(), Normed()
    planned(model, recomputes=True)
    for each in (model, plain):
        first, second = each(batch(0)), each(batch(1))
        first.backward()
        second.backward()
    assert_equal(model.buffers(), plain.buffers())
    assert_same_gradients(model, plain)


def test_frozen_statistics_stay() -> None:
    model = Normed()
    model.first.eval()
    plain = copy.deepcopy(model)
    planned(model, recomputes=False)
    for each in (model, plain):
        each(batch(0)).backward()
    assert_equal(model.buffers(), plain.buffers())
