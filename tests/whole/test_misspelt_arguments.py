"""A misspelt keyword argument is refused with the name that was meant, by every entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint_solver import apply, compile, fit, measure, solve, sweep, verify
from checkpoint_solver.fallback import plan_chain

MODEL, BATCH = nn.Linear(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        (lambda **k: fit(MODEL, **k), "buget", "budget"),
        (lambda **k: fit(MODEL, **k), "time_limit", "time_limit_s"),
        (lambda **k: fit(MODEL, **k), "optimiser", "optimizer"),
        (lambda **k: solve(MODEL, BATCH, budget="1GB", **k), "optimiser", "optimizer"),
        (lambda **k: solve(MODEL, BATCH, **k), "budgt", "budget"),
        (lambda **k: apply(MODEL, None, **k), "on_missmatch", "on_mismatch"),
        (lambda **k: compile(MODEL, BATCH, budget="1GB", **k), "optimiser", "optimizer"),
        (lambda **k: plan_chain(MODEL, BATCH, budget="1GB", **k), "optimiser", "optimizer"),
        (lambda **k: measure(MODEL, BATCH, **k), "optimiser", "optimizer"),
        (lambda **k: verify(None, **k), "optimiser", "optimizer"),
        (lambda **k: sweep(None, **k), "budget", "budgets"),
    ],
)
def test_the_name_that_was_meant(call: Callable[..., Any], given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"takes no argument '{given}'; did you mean '{meant}'\?"):
        call(**{given: 1})


def test_a_name_like_none() -> None:
    with pytest.raises(TypeError, match=r"fit\(\) takes no argument 'xyzzy'$"):
        fit(MODEL, xyzzy=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: solve(MODEL, BATCH, "1GB"), r"3 .* takes 2 \(problem, batch\); .* budget=\.\.\.$"),
        (
            lambda: fit(MODEL, "1GB"),
            r"2 .* takes 1 \(model\); .* budget=\.\.\.; it takes no",
        ),
        (lambda: sweep(None, ["1GB"]), r"2 arguments .* takes 1 \(problem\); .* budgets=\.\.\.$"),
    ],
)
def test_arguments_that_need_a_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_what_another_function_takes() -> None:
    with pytest.raises(TypeError, match=r"'parameters'; .*solve\(\.\.\., parameters=.*apply"):
        fit(MODEL, parameters="auto")


def test_a_callback_says_so_when_it_is_made() -> None:
    pytest.importorskip("transformers")
    from checkpoint_solver.integrations.hugging_face import FitCallback

    with pytest.raises(TypeError, match="did you mean 'reserve'"):
        FitCallback(resrve="1GB")


def test_a_plan_is_verified_from_what_solve_returned() -> None:
    with pytest.raises(TypeError, match=r"an object of type str; give .*Solution\.load"):
        verify("schedule.json", model=list, batch=list)
