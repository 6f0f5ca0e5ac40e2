"""Models of the zoo and steps as people write them: the same bits with the plan as without.

Here every model that is not large runs the schedule that keeps nothing but what it must, which runs
the most again, and a few run plans for a budget. `python -m benchmarks.matrix` runs all of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness import circumstances
from benchmarks.matrix import (
    changes,
    faults,
    footprint,
    line,
    markdown,
    prepare,
    run_budget,
    run_solution,
)
from benchmarks.same_bits import keeping_nothing, solution_of
from benchmarks.step_styles import STYLES
from benchmarks.zoo import ZOO
from graphs.costs.models import Measured
from solver.schedule import baseline

QUICK = "several losses"
"""The cheapest: the one of the default lane."""
SMALL = [QUICK, *(name for name, entry in ZOO.items() if not entry.large and name != QUICK)]
N_TENSORS = 3 * 8
"""Compared at least: three steps of the smallest model."""
STYLED = [
    ("several losses", "autocast fp16, scaler"),
    ("BERT", "LoRA"),
    ("BERT", "autocast bf16"),
    ("GPT-2", "autocast bf16"),
    ("VGG", "accumulation"),
    ("VGG", "half frozen"),
    ("graph network", "hooks, clipping"),
    ("graph network", "gradients of inputs"),
    ("Llama", "optimizer in backward"),
    ("several losses", "optimizer in backward"),
]


def row_keeping_nothing(name: str, style: str, **options: Any) -> dict[str, Any]:
    """The row of the schedule that makes everything again. Workspace is estimated, not measured,
    so its bytes are not judged here.
    """
    subject = prepare(ZOO[name], STYLES[style], **options)
    solution = keeping_nothing(subject.rewritten)
    assert solution.simulation.n_recomputed > 0
    return run_solution(subject, solution)


@pytest.mark.slow(sample=1, keep=5)
@pytest.mark.parametrize("name", SMALL)
def test_every_model_trains_the_same_bits(name: str) -> None:
    row = row_keeping_nothing(name, "plain")
    assert row["n_compared"] > N_TENSORS
    assert row["differences"] == []


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("name", "style"), STYLED)
def test_steps_as_people_write_them_train_the_same_bits(name: str, style: str) -> None:
    row = row_keeping_nothing(name, style)
    assert row["n_compared"] > N_TENSORS
    assert row["differences"] == []


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("share", [0.7, 0.0])
@pytest.mark.parametrize("name", ["VGG", "U-Net", "several losses"])
def test_plans_for_a_budget_train_the_same_bits_within_it(name: str, share: float) -> None:
    subject = prepare(ZOO[name], STYLES["plain"], costs=Measured(torch.device("cpu")))
    row = run_budget(subject, share, time_limit_s=600.0)
    assert row["n_recomputed"] > 0
    assert faults(row) == []


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["several losses", "VGG", "U-Net", "GPT-2", "Llama"])
def test_outputs_in_place_of_inputs_take_the_memory_that_is_predicted(name: str) -> None:
    subject = prepare(ZOO[name], STYLES["plain"], costs=Measured(torch.device("cpu")))
    graph = subject.rewritten
    assert any(node.overwrites for node in graph.nodes)
    row = run_solution(subject, solution_of(graph, baseline(graph)))
    assert row["n_recomputed"] == 0
    assert row["differences"] == []
    assert abs(row["measured_peak_bytes"] - row["predicted_peak_bytes"]) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("style", ["optimizer in backward", "hooks, clipping"])
def test_what_the_loop_takes_itself_is_all_that_the_plan_does_not_know(style: str) -> None:
    subject = prepare(ZOO[QUICK], STYLES[style], costs=Measured(torch.device("cpu")))
    row = run_budget(subject, 0.4, time_limit_s=600.0)
    assert faults(row) == []
    assert row["measured_peak_bytes"] <= row["predicted_peak_bytes"] + row["own_bytes"]


def test_what_is_wrong_is_told() -> None:
    good = {
        "model": "net",
        "style": "plain",
        "share": 0.7,
        "n_nodes": 3,
        "prepared_s": 0.1,
        "solve_s": 0.1,
        "status": "optimal",
        "budget_bytes": 10**8,
        "rewrites": ["in_place"],
        "n_recomputed": 3,
        "n_compared": 5,
        "differences": [],
        "predicted_peak_bytes": 10**8,
        "measured_peak_bytes": 10**8,
        "own_bytes": 0,
    }
    assert faults(good) == []
    assert faults({**good, "measured_peak_bytes": 10**8 + 5, "own_bytes": 5}) == []
    above = {**good, "measured_peak_bytes": 10**8 + 1}
    far = {**good, "measured_peak_bytes": 97 * 10**6}
    other = {**good, "differences": ["step 0: loss (0) differs"]}
    none = {k: v for k, v in good.items() if k != "measured_peak_bytes"} | {"status": "infeasible"}
    refused = {"model": "net", "style": "LoRA", "refused": "it is odd"}
    assert faults({**far, "own_memory": True}) == []
    for row, words in ((above, "above the budget"), (far, "predicted"), (other, "loss")):
        assert words in " ".join(faults(row))
        assert words in line(row)
    assert faults(none) == ["no plan: infeasible"]
    assert "it is odd" in line(refused)
    report = {
        "circumstances": circumstances(1.0),
        "models": {"net": [good, above, far, other, none, refused]},
    }
    text = markdown(report)
    assert "5 cells, 25 tensors" in text
    assert "4 cells with a fault, 1 refused by name; 5 of the plans have rewrites" in text


def test_what_tracing_leaves_behind_would_be_seen() -> None:
    model = nn.BatchNorm1d(3)
    before = footprint(model)
    assert changes(before, footprint(model)) == []
    torch.rand(1)
    assert changes(before, footprint(model)) == ["the random state"]
    model.running_mean.add_(1.0)
    model.seen = 3
    model.register_forward_hook(lambda *_: None)
    changed = changes(before, footprint(model))
    assert {"the numbers of running_mean", ".seen", "._forward_hooks"} <= set(changed)
