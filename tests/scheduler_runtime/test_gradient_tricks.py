"""Forward passes that change gradients by means of Python: as in eager mode, or refused."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphs.trace import TraceError
from scheduler_runtime import apply, fit, remove
from solver import Solution, solve
from solver.solving import answer
from tests.support.bitwise import assert_equal
from tests.support.gradient_tricks import (
    PARTS_ONLY,
    PLANNED_TRICKS,
    TrickyNet,
    batch,
    checkpointed_with_dropout,
)
from tests.support.refused_gradient_tricks import REFUSED_TRICKS

SHARES = (1.0, 0.8, 0.6)
"""Of what lies between the memory that is resident and the peak without a plan."""

WITHOUT_LINE = (
    "full_backward_hook_in_forward",
    "function_that_writes_a_buffer",
    "checkpointed_reentrant",
)
"""Found when forward has returned."""


def trained(model: TrickyNet) -> list[Tensor | None]:
    """Losses, gradients and buffers of two steps."""
    torch.manual_seed(2)
    found: list[Tensor | None] = []
    for _ in range(2):
        model.zero_grad()
        loss = model(batch())
        loss.backward()
        found.append(loss.detach())
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def at_shares(model: TrickyNet) -> list[Solution]:
    free = solve(model, batch(), budget="1GB")
    assert free.variants is not None
    low, high = free.graph.resident_bytes, free.baseline.peak_bytes
    budgets = [int(low + share * (high - low)) for share in SHARES]
    requests = [dataclasses.replace(free.request, budget_bytes=each) for each in budgets]
    return [answer(free.variants, request) for request in requests]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("inside", [False, True], ids=["model", "submodule"])
@pytest.mark.parametrize("name", PLANNED_TRICKS)
def test_same_as_eager_mode(name: str, inside: bool) -> None:
    plain = TrickyNet(PLANNED_TRICKS[name], inside=inside)
    model, state = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
    if name in PARTS_ONLY and not inside:
        message = r"cannot be (traced|planned) .*gradient_tricks\.py, line"
        with pytest.raises(TraceError, match=message):
            solve(model, batch(), budget="1GB")
        return
    wanted, n_run = trained(plain), 0
    for solution in at_shares(model):
        if solution.schedule is not None:
            model.load_state_dict(state)
            apply(model, solution)
            assert_equal(trained(model), wanted)
            remove(model)
            n_run += 1
    assert n_run >= 1


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", REFUSED_TRICKS)
@pytest.mark.parametrize("inside", [False, True], ids=["model", "submodule"])
def test_refused_with_the_line(name: str, inside: bool) -> None:
    trick, why = REFUSED_TRICKS[name]
    model = TrickyNet(trick, inside=inside)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match=why) as refused:
        solve(model, batch(), budget="1GB")
    line = re.search(r"gradient_tricks\.py, line (\d+)", str(refused.value))
    assert (line is None) == (name in WITHOUT_LINE)
    if line is not None:
        first = trick.__code__.co_firstlineno
        assert first < int(line[1]) < first + 12
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.slow
def test_a_checkpoint_that_draws_other_numbers_is_planned_as_one_that_draws_the_same() -> None:
    """In eager mode its gradients are those of a loss that was never computed."""
    preserving, other = (
        TrickyNet(checkpointed_with_dropout(preserve_rng_state=p), inside=False)
        for p in (True, False)
    )
    wanted = trained(preserving)
    with pytest.raises(AssertionError):
        assert_equal(trained(copy.deepcopy(other)), wanted)
    for solution in at_shares(other):
        if solution.schedule is not None:
            apply(other, solution)
            assert_equal(trained(other), wanted)
            remove(other)


def test_hooks_of_saved_tensors_around_a_planned_module() -> None:
    model = TrickyNet(PLANNED_TRICKS["tensor_hook"], inside=False)
    apply(model, solve(model, batch(), budget="1GB"))
    wanted = trained(model)
    with save_on_cpu():
        assert_equal(trained(model), wanted)
    halved = saved_tensors_hooks(lambda t: t.detach() / 2, lambda t: t)
    with halved, pytest.raises(RuntimeError, match=r"called inside of .*saved_tensors_hooks"):
        model(batch())
    assert_equal(trained(model), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_module_that_is_planned_inside_of_it(*, reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
    model = copy.deepcopy(plain)
    fit(model, budget="1GB", passes=2)
    gradients = []
    for net in (plain, model):
        torch.manual_seed(1)
        for _ in range(2):

            def scaled(x: Tensor, net: nn.Module = net) -> Tensor:
                return net(x * 2).tanh()

            batch = torch.randn(4, 8, requires_grad=True)
            checkpoint(scaled, batch, use_reentrant=reentrant).square().mean().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert_equal(*gradients)
