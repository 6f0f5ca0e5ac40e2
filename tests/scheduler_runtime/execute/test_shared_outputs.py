"""Outputs that are views of one another (CLIP: `return logits, logits.t()`), the loss outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.model_calls import nested
from graphs.trace import TraceError
from scheduler_runtime import apply, fit, plans_of, verify
from scheduler_runtime.execute.cuda_graph import CudaGraphError, check_program
from solver import solve
from tests.support.bitwise import assert_equal

N = 24


class Towers(nn.Module):
    """Two towers, a temperature, and what `returned` makes of their products."""

    def __init__(self, returned: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 16))
        self.other = nn.Sequential(nn.Linear(10, 40), nn.GELU(), nn.Linear(40, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.returned = returned

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scale = self.scale.exp()
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        return self.returned(scale * a @ b.t(), scale)


def clip(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return logits, logits.t()


def clip_dict(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return {"image": logits, "text": logits.t(), "scale": scale}


def views_of_one(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return logits.t(), logits.view(2, -1), logits[3:]


def halves(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return logits.chunk(2, dim=-1)


def read_inside(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    """The model itself reads the tensor before and after the view, and the view."""
    before = logits.exp()
    text = logits.t()
    return logits, before, text, text.sigmoid() * logits.cos()


def views_of_views(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    text = logits.t()
    return text, logits, text[::2], text.view_as(text)


def loss_of(output: Any, _batch: Any) -> torch.Tensor:
    """Cross-entropy of each, twice over, so that sums of gradients have several terms."""
    flat = output.values() if isinstance(output, dict) else output
    terms = [0.1 * each.square() if each.dim() == 0 else _entropy(each) for each in flat]
    return torch.stack(terms).sum()


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    label = torch.arange(logits.shape[0]) % logits.shape[1]
    return F.cross_entropy(logits, label) + 0.3 * logits.tanh().mean() + logits.pow(3).mean()


def loss_of_last(output: Any, _batch: Any) -> torch.Tensor:
    return _entropy(output[-1])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 12, generator=generator), torch.randn(N, 10, generator=generator)


def made(returned: Callable[..., Any]) -> Towers:
    torch.manual_seed(0)
    return Towers(returned)


def gradients_after(model: nn.Module, loss: Callable[..., torch.Tensor]) -> list[Any]:
    for _ in range(2):
        model.zero_grad()
        loss(model(*batch()), batch()).backward()
    return [parameter.grad for parameter in model.parameters()]


FORMS = [clip, clip_dict, views_of_one, halves, read_inside, views_of_views]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [loss_of, loss_of_last])
@pytest.mark.parametrize("returned", [each for each in FORMS if each is not clip_dict])
def test_apply_has_the_gradients_of_eager_mode(returned: Any, loss: Any) -> None:
    plain, planned = made(returned), made(returned)
    apply(planned, solve(planned, batch(), budget="1MB", loss=loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no gradient is copied into another layout
        assert_equal(gradients_after(plain, loss), gradients_after(planned, loss))


@pytest.mark.slow
@pytest.mark.parametrize("returned", FORMS)
def test_fit_has_the_gradients_of_eager_mode(returned: Any) -> None:
    plain, planned = made(returned), made(returned)
    fit(planned, budget="1MB", optimizer=torch.optim.SGD(planned.parameters()))
    assert_equal(gradients_after(plain, loss_of), gradients_after(planned, loss_of))


@pytest.mark.slow
def test_a_temperature_beside_logits_is_not_the_loss() -> None:
    """So the first plan is for the gradients that arrive."""
    planned = made(clip_dict)
    fit(planned, budget="1MB", optimizer=torch.optim.SGD(planned.parameters()))
    gradients_after(planned, loss_of)
    for plan in plans_of(planned):
        assert plan.solution.graph.meta.environment["gradient_outputs"] == [0, 1, 2]
    with pytest.raises(TraceError, match="no single loss can be found"):
        solve(made(clip_dict), batch(), budget="1MB")


@pytest.mark.slow
def test_the_least_budget_has_the_gradients_of_eager_mode() -> None:
    plain, planned = made(clip), made(clip)
    least_bytes = solve(planned, batch(), budget="1KB", loss=loss_of).minimum_budget_bytes
    assert least_bytes is not None
    solution = solve(planned, batch(), budget=least_bytes, loss=loss_of)
    assert solution.simulation.peak_bytes < solution.baseline.peak_bytes
    apply(planned, solution)
    assert_equal(gradients_after(plain, loss_of), gradients_after(planned, loss_of))


@pytest.mark.slow
def test_it_is_verified() -> None:
    """In memory, too: the gradients of the views and their sum are counted."""

    def many() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(512, 12), torch.ones(512, 10)

    solution = solve(made(clip), many(), budget="1GB", loss=loss_of)
    found = verify(solution, model=lambda: made(clip), batch=many, loss=loss_of)
    assert found.passed
    assert found.n_gradients == 9
    for predicted, measured in (
        (found.predicted_peak_bytes, found.measured_peak_bytes),
        (found.baseline_predicted_peak_bytes, found.baseline_measured_peak_bytes),
    ):
        assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_they_cannot_be_recorded_as_a_cuda_graph() -> None:
    model = made(clip)
    planned: Any = apply(model, solve(model, batch(), budget="1MB", loss=loss_of))
    planned(*batch())
    ((_, bound),) = planned.forward._programs.programs
    with pytest.raises(CudaGraphError, match="share memory"):
        check_program(bound)


@pytest.mark.slow
@pytest.mark.parametrize("returned", [clip, views_of_one, halves])
def test_the_outputs_share_memory_as_in_eager_mode(returned: Any) -> None:
    model = made(returned)
    expected = model(*batch())
    apply(model, solve(model, batch(), budget="1MB", loss=loss_of))
    got = model(*batch())
    assert len({each.untyped_storage().data_ptr() for each in got}) == 1
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.storage_offset() == other.storage_offset()


def planned_clip() -> Towers:
    model = made(clip)
    apply(model, solve(model, batch(), budget="1MB", loss=loss_of))
    return model


@pytest.mark.slow
def test_a_write_to_the_view_is_refused() -> None:
    _image, text = planned_clip()(*batch())
    with pytest.raises(RuntimeError, match="modified inplace"):
        text.mul_(2.0)


@pytest.mark.slow
def test_a_view_of_what_was_written_is_refused() -> None:
    image, text = planned_clip()(*batch())
    image.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified inplace"):
        loss_of((image, text), None).backward()


@pytest.mark.slow
def test_a_write_that_autograd_does_not_see_is_noticed() -> None:
    image, text = planned_clip()(*batch())
    loss = image.exp().sum() + text.pow(2).sum()
    with torch.no_grad():
        image.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


class Writable(nn.Module):
    """Whose backward pass reads the output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        made = self.linear(x).exp()
        return made, made.t()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("at", [0, 1])
def test_a_write_to_either_is_noticed_by_a_backward_pass_that_reads_it(at: int) -> None:
    model, x = Writable(), torch.randn(5, 6)
    apply(model, solve(model, x, budget="1MB", loss=lambda o, _: o[0].sum() + o[1].sum()))
    output = model(x)
    loss = output[0].sum() + output[1].sum()
    output[at].detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        loss.backward()


def twice(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return logits, scale, logits


def twice_in_a_dict(logits: torch.Tensor, scale: torch.Tensor) -> Any:
    return {"last": logits, "scale": scale, "all": [logits.tanh(), logits], "text": logits.t()}


def loss_of_leaves(output: Any, _batch: Any) -> torch.Tensor:
    """The gradients of the tensor's places do not come in the order of the places."""
    flat = nested.leaves(output)
    return loss_of([*flat[2:], *flat[:2]], None)


TWICE = [twice, twice_in_a_dict]


@pytest.mark.slow
@pytest.mark.parametrize("returned", TWICE)
def test_one_tensor_returned_twice_has_the_gradients_of_eager_mode(returned: Any) -> None:
    """It gets one gradient, which autograd sums up in the order of the loss."""
    plain, applied, fitted = made(returned), made(returned), made(returned)
    apply(applied, solve(applied, batch(), budget="1MB", loss=loss_of_leaves))
    fit(fitted, budget="1MB", optimizer=torch.optim.SGD(fitted.parameters()))
    expected = gradients_after(plain, loss_of_leaves)
    assert_equal(expected, gradients_after(applied, loss_of_leaves))
    assert_equal(expected, gradients_after(fitted, loss_of_leaves))
    for model in (plain, applied, fitted):
        flat = nested.leaves(model(*batch()))
        assert len(set(map(id, flat))) == len(flat) - 1


@pytest.mark.slow
def test_one_tensor_returned_twice_may_get_its_gradient_in_either_place() -> None:
    plain, planned = made(twice), made(twice)
    apply(planned, solve(planned, batch(), budget="1MB", loss=loss_of_last))
    assert_equal(gradients_after(plain, loss_of_last), gradients_after(planned, loss_of_last))
    other = lambda output, _batch: _entropy(output[0])  # noqa: E731
    assert_equal(gradients_after(plain, other), gradients_after(planned, other))


@pytest.mark.slow
def test_outputs_without_a_gradient_are_one_tensor_too() -> None:
    def shown(logits: torch.Tensor, _scale: torch.Tensor) -> Any:
        seen = logits.detach().exp()
        return logits, seen, seen

    planned = made(shown)
    apply(planned, solve(planned, batch(), budget="1MB", loss=lambda o, _: _entropy(o[0])))
    _, one, other = planned(*batch())
    assert one is other


class Weights(nn.Module):
    """Returns views of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight, self.weight.t(), self.weight[:2]


def test_views_of_a_parameter_are_refused() -> None:
    loss = lambda output, _: sum(each.sum() for each in output)  # noqa: E731
    with pytest.raises(TraceError, match=r"output \[1\] .* view of one; return a clone"):
        solve(Weights(), torch.randn(5, 6), budget="1MB", loss=loss)
