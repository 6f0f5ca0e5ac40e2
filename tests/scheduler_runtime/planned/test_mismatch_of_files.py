"""A schedule file that is not of the module, or is damaged, is refused; what differs is told."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from graphs.files import FormatError
from graphs.model_calls import TraceError
from graphs.pipeline import Pipeline
from scheduler_runtime import PlanMismatchError, apply
from solver import solve
from tests.scheduler_runtime.planned.test_mismatch import Scaled, Switched, scaled_batch
from tests.support.bitwise import one_step
from tests.support.models import TiedLanguageModel


@pytest.mark.slow
def test_a_file_whose_plan_is_above_its_budget_is_refused(tmp_path: Path) -> None:
    model, batch = TiedLanguageModel(), TiedLanguageModel.batch()
    solution = solve(model, batch, budget="1GB")
    less = dataclasses.replace(solution.request, budget_bytes=solution.simulation.peak_bytes // 2)
    dataclasses.replace(solution, request=less).save(tmp_path / "schedule.json")
    apply(model, tmp_path / "schedule.json")
    with pytest.raises(PlanMismatchError, match="its budget leaves"):
        one_step(model, batch, 0)


def test_a_schedule_file_whose_ops_were_cut_is_damaged(tmp_path: Path) -> None:
    model, batch = Scaled(), scaled_batch()
    file = tmp_path / "schedule.json"
    solve(model, batch, budget="1MB").save(file)
    saved = json.loads(file.read_text())
    saved["ops"] = saved["ops"][:-3]
    file.write_text(json.dumps(saved))
    with pytest.raises(FormatError, match=r"ops: \d+ operators are computed, .*damaged"):
        apply(model, file)


@pytest.mark.parametrize(
    ("is_deeper", "words"),
    [
        (False, r"has 2 parameters, planned for 4: '1.weight' \(and 1 more\) is in the plan only"),
        (True, r"has 6 parameters, planned for 4: '2.weight' \(and 1 more\) is not in the plan"),
    ],
)
def test_a_file_of_another_stage_is_told_by_its_parameters(
    is_deeper: bool, words: str, tmp_path: Path
) -> None:
    stage = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.ones(4, 8)
    place = Pipeline(stage=0, n_stages=2, n_microbatches=4)
    solve(stage, x, budget="1MB", pipeline=place).save(tmp_path / "plan.json")
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3 if is_deeper else 1)))
    with pytest.raises(PlanMismatchError, match=words) as found:
        apply(other, tmp_path / "plan.json")(x)
    said = str(found.value)
    assert "the plan is of stage 0 of 2" in said
    assert said.index("another stage?") < said.index("replan")


def test_a_file_is_of_the_same_module_under_other_names(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.ones(4, 8)
    solve(layers, x, budget="1MB", loss=lambda y, _: y.sum()).save(tmp_path / "plan.json")
    named = torch.nn.Sequential(OrderedDict(zip(("first", "last"), layers, strict=True)))
    planned = apply(copy.deepcopy(named), tmp_path / "plan.json")
    for batch in (x, x[:3]):
        assert torch.equal(planned(batch), named(batch))


def test_a_file_of_a_later_stage_is_told_by_the_gradient_of_its_input(tmp_path: Path) -> None:
    stage, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(4, 8)
    place = Pipeline(stage=1, n_stages=2, n_microbatches=4)
    solution = solve(
        stage, x.requires_grad_(), budget="1MB", pipeline=place, loss=lambda y, _: y.sum()
    )
    solution.save(tmp_path / "plan.json")
    words = r"argument input is float32 \[4, 8\], planned for float32 \[4, 8\], requires a gradient"
    with pytest.raises(PlanMismatchError, match=words):
        apply(stage, tmp_path / "plan.json")(x.detach())


@pytest.mark.parametrize("is_older", [False, True])
def test_a_file_names_the_operator_that_differs(is_older: bool, tmp_path: Path) -> None:
    model, batch = Switched(), (torch.ones(4, 8), torch.ones(4, 8))
    path = tmp_path / "plan.json"
    solve(model, batch, budget="1MB", optimizer=torch.optim.SGD).save(path)
    if is_older:
        saved = json.loads(path.read_text())
        for name in ("parameter_forms", "buffer_forms", "input_forms", "n_module_operators"):
            del saved["environment"][name]
        path.write_text(json.dumps(saved))
    other = Switched()
    other.squares = False
    with pytest.raises(PlanMismatchError, match=r"operator abs.* instead of pow.* from mask"):
        apply(other, path)(*batch)
    assert torch.equal(apply(Switched(), path)(*batch).isfinite(), torch.tensor(True))


@pytest.mark.parametrize("index", [-1, 1])
def test_a_file_with_a_gradient_of_an_output_that_there_is_not(index: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    solve(Scaled(), scaled_batch(), budget="1MB").save(path)
    saved = json.loads(path.read_text())
    saved["environment"]["gradient_outputs"] = [index]
    path.write_text(json.dumps(saved))
    with pytest.raises(TraceError, match=rf"output {index} is to get a gradient.*returns 1"):
        apply(Scaled(), path)(*scaled_batch())
