"""The gradient of an output in another memory layout than the output's."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkpoint_solver import apply, fit, solve
from scheduler_runtime import plans_of
from tests.support.bitwise import assert_equal

WEIGHTS = torch.randn(16, 8, 64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(1))

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permuted": lambda output: (output.permute(2, 0, 1) * WEIGHTS).sum(),
    "classes in the middle": lambda output: F.cross_entropy(output.mT, TARGETS),
}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GroupNorm(8, 64), nn.GELU(), nn.Linear(64, 16))
    return plain, copy.deepcopy(plain)


def trained(model: nn.Module, losses: list[Callable[[torch.Tensor], torch.Tensor]]) -> list:
    """The gradients of each step, then the buffers."""
    found = []
    batch = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in losses:
            model.zero_grad()
            loss(model(batch)).backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
    return [*found, *model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_fit_plans_for_the_layout_that_arrives(name: str) -> None:
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    steps = [LOSSES[name]] * 2
    assert_equal(trained(plain, steps), trained(planned, steps))
    n_plans = len(plans_of(planned))
    trained(planned, steps)
    assert len(plans_of(planned)) == n_plans


@pytest.mark.slow
def test_fit_follows_from_one_layout_to_another_and_back() -> None:
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    other = lambda output: (output * WEIGHTS.permute(1, 2, 0)).square().sum()  # noqa: E731
    steps = [LOSSES["permuted"], other, LOSSES["permuted"], other, other]
    assert_equal(trained(plain, steps), trained(planned, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_plan_with_this_loss_is_for_its_layout(name: str) -> None:
    plain, planned = models()
    batch = torch.randn(8, 64, 32)
    solution = solve(planned, batch, loss=lambda out, _: LOSSES[name](out), budget="100MB")
    apply(planned, solution)
    assert_equal(trained(plain, [LOSSES[name]]), trained(planned, [LOSSES[name]]))


def test_apply_tells_of_a_layout_that_was_not_planned() -> None:
    planned = models()[1]
    batch = torch.randn(8, 64, 32)
    apply(planned, solve(planned, batch, loss=lambda out, _: out.square().sum(), budget="100MB"))
    with pytest.warns(UserWarning, match=r"arrives with strides .* Plan with this loss"):
        LOSSES["permuted"](planned(batch)).backward()


def test_an_expanded_gradient_has_the_same_bits_and_is_not_told() -> None:
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    steps = [lambda output: output.mean() * 0.3]
    assert_equal(trained(plain, steps), trained(planned, steps))
    assert len(plans_of(planned)) == 1
