"""Each plan is told in one line; from the second one on as a warning with its reason and remedy."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import apply, fit, plans_of
from solver import solve
from tests.support.models import TiedLanguageModel

LINE = (
    r"TiedLanguageModel: peak .*B -> .*B, time \+.* % \(bound .*\), planned.* for "
    r"tokens \[{shape}\] in .*s"
)
SIZES = (
    ". Remedy: pad the batches to a few sizes (pad_to_multiple_of=64 of the data collator, "
    'padding="max_length" of the tokenizer)'
)
LARGEST_FIRST = ". Begin with the largest"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Level and text of the lines about finished plans."""
    caplog.set_level(logging.INFO, logger="checkpoint_solver")
    return lambda: [
        (r.levelno, r.getMessage()) for r in caplog.records if ": peak" in r.msg % r.args
    ]


def fitted(model: nn.Module) -> Any:
    return fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters()))


class Mean(nn.Module):
    """Of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(x)).mean()


def train(model: Any, *batches: torch.Tensor) -> None:
    for batch in batches:
        model.zero_grad()
        model(batch).backward()


@pytest.mark.slow
def test_each_length_is_told_with_its_price_and_a_remedy(lines: Any) -> None:
    model, tokens = fitted(TiedLanguageModel()), TiedLanguageModel.batch()
    train(model, tokens[:, :8], tokens, tokens[:, :8], tokens[:, :7])
    (first, line), (second, longer), (third, shorter) = lines()
    assert (first, second, third) == (logging.INFO, logging.WARNING, logging.WARNING)
    assert re.fullmatch(LINE.format(shape="3, 8"), line)
    told = r"\. Plan {n}, .* s in all: argument tokens has shape \[3, {new}\], planned "
    told += r"for \[3, {old}\]"
    ends = re.escape(SIZES)
    expected = LINE.format(shape="3, 10") + told.format(n=2, new=10, old=8) + ends + LARGEST_FIRST
    assert re.fullmatch(expected, longer)
    expected = LINE.format(shape="3, 7") + told.format(n=3, new=7, old=10)
    assert re.fullmatch(expected, shorter)  # the remedy is given once
    assert all(plan.took_s > plan.solution.solve_time_s for plan in plans_of(model))


@pytest.mark.slow
def test_a_plan_that_carries_nothing_over_is_from_no_earlier_one(lines: Any) -> None:
    model, tokens = fitted(TiedLanguageModel()), TiedLanguageModel.batch()
    train(model, tokens, tokens[:, :8])
    assert plans_of(model)[1].reused  # without a search: it recomputes nothing
    assert all("earlier plan" not in line for _, line in lines())


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_short_last_batch_has_another_remedy(lines: Any, accumulates: bool) -> None:
    model, tokens = fitted(TiedLanguageModel()), TiedLanguageModel.batch()
    train(model, tokens, tokens)
    if accumulates:
        model(tokens).backward()
        model(tokens).backward()  # a plan of its own
    train(model, tokens[:1])
    *_, (level, line) = lines()
    assert level == logging.WARNING
    assert line.endswith(
        "argument tokens has shape [1, 10], planned for [3, 10]. A short last batch is planned "
        "once (twice with gradient accumulation); DataLoader(drop_last=True) leaves it out"
    )


@pytest.mark.slow
def test_accumulation_is_no_reason_to_warn(lines: Any) -> None:
    model, tokens = fitted(TiedLanguageModel()), TiedLanguageModel.batch()
    for _ in range(3):
        model(tokens).backward()
    assert [level for level, _ in lines()] == [logging.INFO, logging.INFO]


class Masked(nn.Module):
    """Reads whether its mask is all ones, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x) if mask.all() else self.layer(x).masked_fill(~mask[:, None], 0.0)
        return (hidden * self.scale).square().sum()


def test_other_values_and_attributes_are_reasons_by_name(lines: Any) -> None:
    model, x, ones = fitted(Masked()), torch.ones(4, 8), torch.ones(4, dtype=torch.bool)
    for mask in (ones, torch.arange(4) < 2):
        model.zero_grad()
        model(x, mask).backward()
    model.scale = 2.0
    model.zero_grad()
    model(x, ones).backward()
    _, (_, of_values), (_, of_state) = lines()
    assert of_values.endswith(
        "Plan 2, "
        + re.search(r"[0-9.]+ s in all", of_values)[0]
        + ": argument mask has other values than when planned: forward reads False"
    )
    assert of_state.endswith(": attribute 'scale' of Masked is 2.0, planned for 1.0")


@pytest.mark.slow
def test_apply_tells_its_plans_for_other_calls(
    lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = TiedLanguageModel(), TiedLanguageModel.batch()
    apply(model, solve(model, tokens, budget="1GB"), on_mismatch="replan")
    train(model, tokens, tokens[:, :8], tokens.repeat(2, 1))
    _, (first, shorter), (second, larger) = lines()
    assert (first, second) == (logging.WARNING, logging.WARNING)
    told = r"\. Plan {n}: argument tokens has shape \[{new}\], planned for \[3, 10\]"
    expected = LINE.format(shape="3, 8") + told.format(n=2, new="3, 8") + re.escape(SIZES)
    assert re.fullmatch(expected, shorter)
    expected = LINE.format(shape="6, 10") + told.format(n=3, new="6, 10")
    expected += ". Remedy: use batches of a few fixed sizes" + LARGEST_FIRST  # no padding of tokens
    assert re.fullmatch(expected, larger)
    # what takes long says so again, with the seconds
    traced = [message for message in caplog.messages if message == "tracing TiedLanguageModel..."]
    assert len(traced) == 1 + 2  # solve, then each call that is not the planned one, once


def test_batches_that_are_no_tokens_have_no_tokenizer(lines: Any) -> None:
    train(fitted(Mean()), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 16, 16))
    _, (_, larger) = lines()
    assert larger.endswith(". Remedy: use batches of a few fixed sizes. Begin with the largest")
