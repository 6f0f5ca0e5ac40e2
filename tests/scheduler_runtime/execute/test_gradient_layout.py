"""The gradient of an output in another memory layout than the output's."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    "permuted": lambda output: (output.permute(2, 0, 1) * WEIGHTS[:, : len(output)]).sum(),
    "classes in the middle": lambda output: F.cross_entropy(output.mT, TARGETS[: len(output)]),
}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GroupNorm(8, 64), nn.GELU(), nn.Linear(64, 16))
    return plain, copy.deepcopy(plain)


def trained(
    model: nn.Module, losses: list[Callable[[torch.Tensor], torch.Tensor]], rows: Sequence[int] = ()
) -> list:
    """The gradients of each step, then the buffers. rows: of the batch in each step."""
    found = []
    batch = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss, n_rows in zip(losses, rows or [8] * len(losses), strict=True):
            model.zero_grad()
            loss(model(batch[:n_rows])).backward()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_layout_is_known_for_other_shapes(name: str) -> None:
    """Each number of rows is planned once; the first one twice, since the layout is not known."""
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    steps, rows = [LOSSES[name]] * 6, (6, 8, 1, 8, 6, 1)
    assert_equal(trained(plain, steps, rows), trained(planned, steps, rows))
    assert len(plans_of(planned)) == 1 + len(set(rows))


def test_a_smaller_batch_has_the_layout_of_the_plan() -> None:
    plain, planned = models()
    batch = torch.randn(8, 64, 32)
    solution = solve(planned, batch, loss=lambda out, _: LOSSES["permuted"](out), budget="100MB")
    apply(planned, solution)
    steps = [LOSSES["permuted"]] * 2
    assert_equal(trained(plain, steps, (8, 6)), trained(planned, steps, (8, 6)))


class LossAndMore(nn.Module):
    """Returns its loss and hidden values if it is given targets, else logits only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> dict:
        hidden = self.body(x).relu()
        logits = self.head(hidden)
        if targets is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.mT, targets), "hidden": hidden}


def test_the_outputs_of_another_kind_of_call_have_another_number_of_dimensions() -> None:
    torch.manual_seed(0)
    plain = LossAndMore()
    planned = copy.deepcopy(plain)
    batch = torch.randn(8, 64, 32)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for use in ("loss and hidden", "logits", "hidden", "logits"):
            model.zero_grad()
            if use == "logits":
                loss = LOSSES["permuted"](model(batch)["logits"])
            else:
                output = model(batch, TARGETS)
                loss = output["hidden"].square().mean()
                loss = loss + output["loss"] if "loss" in use else loss
            loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    assert_equal(gradients(plain), gradients(planned))


def test_a_plan_of_an_earlier_version_has_strides() -> None:
    plain, planned = models()
    loss = LOSSES["classes in the middle"]
    solution = solve(planned, torch.randn(8, 64, 32), loss=lambda out, _: loss(out), budget="100MB")
    meta = solution.graph.meta
    ((output, order),) = meta.environment["gradient_layouts"]
    assert (output, order) == (0, [0, 2, 1])
    older = {name: each for name, each in meta.environment.items() if name != "gradient_layouts"}
    older["gradient_strides"] = [[0, [1024, 1, 64]]]
    graph = replace(solution.graph, meta=replace(meta, environment=older))
    apply(planned, replace(solution, graph=graph))
    assert_equal(trained(plain, [loss]), trained(planned, [loss]))
