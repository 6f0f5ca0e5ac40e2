"""Functions in a model's own forward that cannot be traced: one piece each, eager bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.measuring import measure
from solver.solving import solve
from tests.scheduler_runtime.test_opaque import half_of_activations, opaque_nodes, train
from tests.support.bitwise import assert_equal

N_CLASSES, WIDTH = 12, 32


class Options:
    """Of a loss; `held` may hide tensors."""

    def __init__(self, held: Any = None) -> None:
        self.weight, self.held = 0.5, held


def matched(scores: Tensor, targets: list[dict[str, Tensor]], options: Options) -> Any:
    """Pairs targets with their best rows, on the host: the loss of DETR in little."""
    order = numpy.argsort(-scores.detach().numpy().max(1))[: len(targets[0]["classes"])]
    return F.cross_entropy(scores[order.copy()], targets[0]["classes"]) * options.weight, {
        "mean": scores.mean()
    }


def of_module(module: nn.Module, scores: Tensor, *_: Any) -> Any:
    return module.head.weight.sum() * float(scores.detach().sum()), {}


def number(scores: Tensor, *_: Any) -> Any:
    return float(scores.detach().sum()), {}


LOSSES: dict[str, Callable[..., Any]] = {"matched": matched, "number": number}


class Detecting(nn.Module):
    """A deep net whose own forward computes the loss, through a table of functions."""

    def __init__(self, loss: str = "matched", options: Options | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, N_CLASSES)
        self.loss, self.options = loss, options or Options()

    def forward(module, x: Tensor) -> Any:  # noqa: N805 - by any name
        for layer in module.layers:
            x = x + module.drop(layer(x))
        scores = module.head(x)
        targets = [{"classes": torch.arange(64) % N_CLASSES}]
        if module.loss == "of module":
            return of_module(module, scores)[0]
        loss, more = LOSSES[module.loss](scores, targets, module.options)
        return loss + sum(more.values()) + 0.0 * scores.sum()


def made(*args: Any) -> tuple[Detecting, Tensor]:
    torch.manual_seed(0)
    return Detecting(*args), torch.randn(512, WIDTH)


@pytest.mark.slow
def test_half_of_the_activations(tmp_path: Path) -> None:
    plain, batch = made()
    model, code = copy.deepcopy(plain), matched.__code__
    solution = half_of_activations(model, batch)
    assert matched.__code__ is code
    assert len(opaque_nodes(solution)) == 1
    notes = " ".join(solution.graph.meta.notes)
    assert "test_opaque_functions:matched is planned as one piece" in notes
    solution.save(tmp_path / "schedule.json")
    apply(model, tmp_path / "schedule.json")
    taken = measure(copy.deepcopy(model), batch, optimizer=None)
    assert taken.peak_bytes <= solution.request.available_bytes
    assert_equal(train(plain, batch), train(model, batch))


@pytest.mark.slow
def test_fit_has_the_bits_of_plain_training() -> None:
    plain, batch = made()
    fitted = fit(copy.deepcopy(plain), budget="20MB", optimizer=[])
    assert_equal(train(plain, batch, n_steps=2), train(fitted, batch, n_steps=2))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("loss", "options", "why"),
    [
        ("of module", Options(), "an argument is an object of type Detecting"),
        ("matched", Options([torch.ones(2)]), "an argument is an object of type Options"),
        ("number", Options(), "something other than tensors and None"),
    ],
)
def test_functions_that_cannot_be_one_piece(loss: str, options: Options, why: str) -> None:
    model, batch = made(loss, options)
    with pytest.raises(TraceError, match="cannot be traced") as refused:
        trace(model, batch)
    assert any(why in note for note in refused.value.__notes__)


@pytest.mark.slow
def test_planning_needs_no_function_that_is_gone() -> None:
    """A plan that names a function of another program is followed by a plan of one's own."""
    plain, batch = made()
    solution = solve(plain, batch, budget="20MB")
    solution.graph.meta.environment["opaque"][0]["module"] = "no.such.package:function"
    planned = apply(copy.deepcopy(plain), solution)
    assert_equal(train(plain, batch, n_steps=1), train(planned, batch, n_steps=1))
