"""Several forward passes before one backward pass, under `fit`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit, plans_of
from tests.support.bitwise import assert_equal
from tests.support.passes import blocks, step_peak_bytes
from tests.support.tiny_transformers import tiny_llama

TOLD = "wait for a backward pass together"


def views(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """As in contrastive learning: one loss of all."""
    a, b, *_ = (F.normalize(model(batch), dim=1) for batch in batches)
    F.cross_entropy(a @ b.T, torch.arange(len(a))).backward()


def losses(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """A loss of each."""
    torch.stack([model(batch).square().mean() for batch in batches]).sum().backward()


def one_by_one(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    kept = []
    for batch in batches:
        kept.append(model(batch))  # held beyond its backward pass
        kept[-1].square().mean().backward()
    model(batches[0])  # never run backward, and not held
    with torch.no_grad():
        kept.append(model(batches[0]))  # as a target: nothing waits
    model(batches[0]).square().mean().backward()


def peaks_and_bits(
    step: Callable[[nn.Module, Sequence[Any]], None],
    model: nn.Module,
    batches: Sequence[Any],
    *,
    n_steps: int = 4,
) -> tuple[list[int], list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(7)
    peaks = [step_peak_bytes(model, step, batches, optimizer) for _ in range(n_steps)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return peaks, [*model.parameters(), *model.buffers(), *gradients]


def fitted(
    step: Callable[[nn.Module, Sequence[Any]], None],
    plain: nn.Module,
    batches: Sequence[Any],
    *,
    share: float,
    n_steps: int = 4,
    **options: Any,
) -> tuple[nn.Module, list[int], int, list[str]]:
    """The fitted model after some steps whose bits are those of plain ones; its peaks; the budget;
    what was told. share: of the way from what is resident to the peak of a plain step."""
    plain_peaks, expected = peaks_and_bits(
        step, copy.deepcopy(plain), batches, n_steps=max(2, n_steps)
    )
    resident_bytes = 2 * sum(p.nbytes for p in plain.parameters())
    budget_bytes = int(resident_bytes + share * (plain_peaks[1] - resident_bytes))
    model = copy.deepcopy(plain)
    fit(model, budget=budget_bytes, optimizer=lambda ps: torch.optim.SGD(ps, momentum=0.9),
        **options)  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peaks, got = peaks_and_bits(step, model, batches, n_steps=max(2, n_steps))
    assert_equal(expected, got)
    return model, peaks, budget_bytes, [str(e.message) for e in caught if TOLD in str(e.message)]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "share", "n_told"), [(views, 0.6, 1), (one_by_one, 1.2, 0)])
def test_a_step_that_may_exceed_the_budget_is_told_and_the_next_one_is_planned(
    step: Callable[..., None], share: float, n_told: int
) -> None:
    torch.manual_seed(0)
    model, peaks, budget_bytes, told = fitted(
        step, blocks(), list(torch.randn(2, 128, 32)), share=share
    )
    assert len(told) == n_told
    assert all("2 forward passes of Sequential" in each for each in told)
    assert (peaks[0] > budget_bytes) == bool(n_told)
    assert max(peaks[1:]) <= budget_bytes
    n_planned = plans_of(model)[-1].solution.graph.n_in_flight
    assert n_planned == 1 + n_told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "sizes", "share"),
    [
        (losses, (128, 128, 128), 0.5),
        (losses, (256, 128), 0.6),
        (views, (128, 128), 0.8),
        (views, (128, 128), 0.4),
        (losses, (128, 256), 0.6),
        (losses, (128, 128, 64), 0.6),
        (losses, (128, 128), 0.3),
    ],
)
def test_said_beforehand_the_budget_holds_from_the_first_step_on(
    step: Callable[..., None], sizes: tuple[int, ...], share: float
) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(size, 32) for size in sizes]
    model, peaks, budget_bytes, told = fitted(
        step, blocks(), batches, share=share, passes=len(sizes)
    )
    is_planned_anew = len({*sizes}) > 1 and bool(told)  # the first knew nothing of the others
    assert max(peaks[is_planned_anew:]) <= budget_bytes
    assert len(told) <= is_planned_anew
    planned = [each.solution for each in plans_of(model)]
    assert {each.graph.n_in_flight for each in planned} == {len(sizes)}
    predicted = [each.simulation.peak_bytes for each in planned if each.simulation is not None]
    assert max(peaks[1:]) <= max(predicted)
    if len({*sizes}) == 1:  # else the room of a smaller call is left
        assert max(peaks[1:]) >= 0.9 * max(predicted)


class Encoder(nn.Module):
    """With what differs between calls: batch norm's averages and dropout's masks."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


@pytest.mark.slow
def test_simclr_with_one_encoder_called_twice() -> None:
    torch.manual_seed(0)
    images = list(torch.randn(2, 16, 3, 12, 12))
    model, peaks, budget_bytes, told = fitted(views, Encoder(), images, share=0.7)
    assert len(told) == 1
    assert max(peaks[1:]) <= budget_bytes < peaks[0]
    assert plans_of(model)[-1].solution.graph.n_in_flight == 2


@pytest.mark.slow
def test_a_discriminator_on_real_and_generated_samples() -> None:
    torch.manual_seed(0)
    generator, plain = blocks(n=1), nn.Sequential(blocks(n=4), nn.Linear(32, 1))

    def step(discriminator: nn.Module, batches: Sequence[torch.Tensor]) -> None:
        real, noise = batches
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        loss = F.binary_cross_entropy_with_logits
        loss(discriminator(generator(noise)), ones).backward()  # of the generator: one pass
        generator.zero_grad()
        discriminator.zero_grad()
        with torch.no_grad():
            made = generator(noise)
        (loss(discriminator(real), ones) + loss(discriminator(made), zeros)).backward()

    batches = list(torch.randn(2, 128, 32))
    model, peaks, budget_bytes, told = fitted(step, plain, batches, share=0.6)
    assert len(told) == 1
    assert {each.solution.graph.n_in_flight for each in plans_of(model)} == {1, 2}
    budget_bytes += batches[1].nbytes  # the noise, which this model is not called with
    assert max(peaks[1:]) <= budget_bytes < peaks[0]


def log_probability(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2))


def dpo(policy: nn.Module, batches: Sequence[Any]) -> None:
    chosen, rejected, reference = batches
    ours = [log_probability(policy, each) for each in (chosen, rejected)]
    with torch.no_grad():
        theirs = [log_probability(reference, each) for each in (chosen, rejected)]
    margin = (ours[0] - theirs[0]) - (ours[1] - theirs[1])
    (-F.logsigmoid(0.1 * margin)).mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("n_rejected", [40, 32])
def test_dpo_of_a_llama_whose_rejected_answers_are_longer(n_rejected: int) -> None:
    plain = tiny_llama(n_layers=3, use_cache=False).train()
    reference = copy.deepcopy(plain).eval().requires_grad_(False)
    batches = [torch.randint(0, 64, (8, length)) for length in (32, n_rejected)]
    model, peaks, budget_bytes, told = fitted(dpo, plain, [*batches, reference], share=0.7)
    assert told
    assert max(peaks[2:]) <= budget_bytes < peaks[0]
    assert plans_of(model)[-1].solution.graph.n_in_flight == 2


def test_a_step_that_is_left_out_is_not_in_flight_with_the_next_one() -> None:
    torch.manual_seed(0)
    model = fit(blocks(n=1), budget="10MB", optimizer=[])
    x, numbers = torch.randn(8, 32), []
    for is_bad in (False, True, False, False):
        output = model(x)  # while the one before is there
        if not is_bad:
            output.square().mean().backward()
        model.zero_grad()
        numbers.append(plans_of(model)[-1].solution.graph.n_in_flight)
    assert numbers == [1, 1, 1, 1]
