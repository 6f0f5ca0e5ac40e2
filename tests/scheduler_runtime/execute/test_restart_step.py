"""Which outputs get a gradient is seen in the backward pass: another set is another plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.measuring import absolute_peak_bytes, resident_tensors
from tests.support.bitwise import assert_equal
from tests.support.word_language import (
    CellLanguageModel,
    RecurrentLanguageModel,
    detached,
)

N_TOKENS, WIDTH, N_ROWS = 60, 32, 4


def language_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "LSTMCell":
        return CellLanguageModel(n_tokens=N_TOKENS, width=WIDTH)
    return RecurrentLanguageModel(kind, n_tokens=N_TOKENS, width=WIDTH)


def train(model: Any, n_steps: int = 4) -> list[torch.Tensor]:
    """As people train language models: the hidden state goes on to the next batch, detached."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden, seen = model.start(N_ROWS), []
    for tokens in torch.randint(N_TOKENS, (n_steps, 5, N_ROWS)):
        scores, hidden = model(tokens[:-1], detached(hidden))
        loss = F.nll_loss(scores, tokens[1:].flatten())
        optimizer.zero_grad()  # in the middle, as often: gradients exist in the forward pass
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*seen, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.slow(keep=4)  # all: PyTorch's word_language_model
@pytest.mark.parametrize("kind", ["LSTMCell", "GRU", "RNN", "LSTM"])
def test_a_hidden_state_that_is_detached_gets_no_gradient(kind: str) -> None:
    plain = language_model(kind)
    fitted = fit(copy.deepcopy(plain), budget="1MB")
    assert_equal(train(plain), train(fitted))
    n_plans = len(plans_of(fitted))
    train(fitted)
    assert len(plans_of(fitted)) == n_plans


class Heads(nn.Module):
    """Two outputs with parameters of their own; dropout, and a buffer that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3))
        self.one, self.other = nn.Linear(64, 512), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"one": self.one(hidden), "other": F.dropout(self.other(hidden), 0.5)}


def step(model: nn.Module, x: torch.Tensor, names: list[str], autocast: bool) -> list[Any]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(x)
        losses = [output[name].float().square().mean() for name in names]
    torch.rand(3)  # the loop draws numbers between forward and backward
    sum(losses).backward()
    state = [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return [*losses, x.grad, *state, torch.get_rng_state()]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [True, False])
def test_every_set_of_outputs_gives_the_bits_of_eager_mode(autocast: bool) -> None:
    torch.manual_seed(0)
    plain = Heads()
    fitted = fit(copy.deepcopy(plain), budget="4MB")
    for seed, names in enumerate((["one"], ["one"], ["other"], ["one", "other"], ["one"])):
        got = []
        for model in (plain, fitted):
            torch.manual_seed(seed)
            x = torch.randn(64, 8, requires_grad=True)
            got.append(step(model, x, names, autocast))
        assert_equal(*got)


@pytest.mark.slow
def test_the_step_that_runs_again_takes_what_its_plan_says() -> None:
    """The plan counts the outputs twice: the caller still holds those of the first pass."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(256, 8)
    fitted = fit(model, budget="4MB")
    peak_bytes = absolute_peak_bytes(
        lambda: step(fitted, x, ["other"], False), x.device, [*resident_tensors(model, x, ())]
    )
    again = plans_of(fitted)[1].solution.simulation
    assert 0.9 * again.peak_bytes <= peak_bytes <= again.peak_bytes


class Queue(nn.Module):
    """A large buffer that each call changes; one output, or two that may get a gradient."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.n_outputs = n_outputs
        self.register_buffer("queue", torch.zeros(256, 1024))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layer(x)
        self.queue.add_(hidden.detach().mean())
        return (hidden.tanh(), hidden.sigmoid())[: self.n_outputs]


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_the_plan_counts_the_buffers_that_are_kept_to_run_again(n_outputs: int) -> None:
    model, x = fit(Queue(n_outputs), budget="10MB"), torch.randn(8, 64)

    def run() -> None:
        sum(output.sum() for output in model(x)).backward()

    run()
    model.zero_grad()
    resident = [*resident_tensors(model, x, ())]
    peak_bytes = absolute_peak_bytes(run, x.device, resident)
    planned_bytes = plans_of(model)[0].solution.simulation.peak_bytes
    assert 0.98 * planned_bytes <= peak_bytes <= planned_bytes
    # the new value, and a copy of the old one where the step may run again
    assert planned_bytes > (1 + n_outputs) * model.queue.nbytes


@pytest.mark.slow
def test_two_forward_passes_before_the_backward_passes_of_both() -> None:
    torch.manual_seed(0)
    plain = Heads()
    fitted = fit(copy.deepcopy(plain), budget="4MB")
    batches = torch.randn(2, 64, 8)
    for model in (plain, fitted):
        torch.manual_seed(1)
        outputs = [model(x)["other"] for x in batches]
        for output in outputs[::-1]:
            output.square().sum().backward()
    assert_equal(*([p.grad for p in model.parameters()] for model in (plain, fitted)))
    assert_equal(plain.buffers(), fitted.buffers())


def test_a_parameter_changed_before_the_step_runs_again_is_refused() -> None:
    fitted = fit(Heads(), budget="4MB")
    output = fitted(torch.randn(64, 8))["other"]
    with torch.no_grad():
        fitted.one.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"cannot run again.*loss_outputs"):
        output.sum().backward()


def test_an_operator_of_the_user_that_draws_draws_the_same_again() -> None:
    """PyTorch does not know that it draws: no tag says so."""

    @torch.library.custom_op("tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    noisy.register_fake(torch.empty_like)
    noisy.register_autograd(lambda _, gradient: gradient * 3.0)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = noisy(self.first(x))
            return self.second(h).square().sum(), h * 2.0

    def steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(3)
        found = []
        for _ in range(2):  # no gradient of the second output was planned
            model.zero_grad()
            loss, other = model(x)
            (loss + other.sin().sum()).backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return [*found, torch.rand(1)]

    model, x = Noisy(), torch.randn(32, 8)
    expected = steps(model, x)
    fit(model, budget="1GB")
    assert_equal(expected, steps(model, x))
