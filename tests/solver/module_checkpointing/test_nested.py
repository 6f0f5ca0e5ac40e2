"""Neighbours of an nn.Sequential in one checkpoint, nested: planned, simulated, and run."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import apply, remove
from scheduler_runtime.by_submodule.planning import plan_chain
from scheduler_runtime.by_submodule.solution import SubmoduleSolution
from scheduler_runtime.execute.sequential_segments import SegmentedForward
from scheduler_runtime.measuring import measure
from solver.chain.problem import Backward, Chain
from solver.chain.rotor import solve_chain
from solver.module_checkpointing.nested import SequentialSteps, nested_regions
from solver.module_checkpointing.regions import CheckpointRegion
from solver.schedule.simulator import simulate
from tests.support.bitwise import assert_equal
from tests.support.command import failed, main, write_model

Batch = tuple[torch.Tensor, torch.Tensor]


class Branch(nn.Module):
    """Looks at what was computed, so that no tracer takes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.mean().item() > 10 else x


def convolutions(*, inplace: bool, n_layers: int = 6) -> tuple[nn.Sequential, Batch]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for i in range(n_layers):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace)]
        layers += [nn.Dropout(0.1)] if i % 2 else []
    layers += [Branch(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return nn.Sequential(*layers), (torch.randn(4, 3, 24, 24), torch.randint(0, 10, (4,)))


def loss_of(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


STEP: dict[str, Any] = {"loss": loss_of, "inputs": lambda batch: batch[0]}


def bits(model: nn.Module, batch: Batch, seed: int) -> list[torch.Tensor]:
    """Loss, gradients and buffers of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(model(batch[0]), batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def planned(model: nn.Module, batch: Batch, share: float) -> tuple[SubmoduleSolution, int]:
    """With this share of the plain step's peak; and the plain step's peak in bytes."""
    plain_bytes = measure(copy.deepcopy(model), batch, n_steps=1, **STEP).peak_bytes
    budget = int(share * plain_bytes)
    return plan_chain(model, batch, budget=budget, time_limit_s=600, **STEP), plain_bytes


def n_runs(regions: tuple[CheckpointRegion, ...], n_steps: int) -> list[int]:
    """Each step runs once, and once more for each checkpoint around it; steps are named 0, 1, .."""
    around = Counter(path for each in regions for inside in each.flat() for path in inside.modules)
    return [1 + around[str(position)] for position in range(n_steps)]


def test_every_persistent_schedule_is_a_tree_of_checkpoints() -> None:
    rng = random.Random(3)
    n_nested = 0
    for _ in range(60):
        n = rng.randint(1, 12)
        x = [rng.randint(1, 9) for _ in range(n + 1)]
        chain = Chain(
            forward_s=[rng.randint(1, 5) for _ in range(n)],
            backward_s=[1] * (n + 1),
            input_bytes=x,
            saved_bytes=[0, *(size + rng.randint(0, 20) for size in x[1:])],
            forward_workspace_bytes=[0] * n,
            backward_workspace_bytes=[0] * (n + 1),
        )
        for budget_bytes in range(20, 200, 15):
            answer = solve_chain(chain, budget_bytes=budget_bytes)
            if answer is None:
                continue
            steps = tuple((str(position),) for position in range(n))
            regions = nested_regions(
                answer.ops, SequentialSteps(nodes=steps, modules=steps, chain=chain)
            )
            n_nested += any(region.depth > 1 for region in regions)
            forwards = Counter(op.block for op in answer.ops if not isinstance(op, Backward))
            assert n_runs(regions, n) == [forwards[block] for block in range(1, n + 1)]
    assert n_nested > 10


@pytest.mark.slow
@pytest.mark.parametrize(("inplace", "share"), [(False, 0.6), (False, 0.45), (True, 0.45)])
def test_layers_are_recomputed_together_within_the_reported_peak(
    inplace: bool, share: float
) -> None:
    plain, batch = convolutions(inplace=inplace)
    model = copy.deepcopy(plain)
    solution, plain_bytes = planned(model, batch, share)
    assert solution.simulation == simulate(solution.graph, solution.schedule)
    assert solution.simulation.peak_bytes <= share * plain_bytes
    assert any(len(region.modules) > 1 for region in solution.segments)
    if share < 0.5:
        assert any(region.depth > 1 for region in solution.segments)
    apply(model, solution)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model) is nn.Sequential
    measured = measure(copy.deepcopy(model), batch, n_steps=1, **STEP).peak_bytes
    assert measured <= solution.simulation.peak_bytes
    for seed in range(2):
        assert_equal(bits(plain, batch, seed), bits(model, batch, seed))
    remove(model)
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_children_run_as_often_as_they_are_nested() -> None:
    model, batch = convolutions(inplace=False)
    solution, _ = planned(model, batch, 0.6)
    apply(model, solution)
    forward = model.__dict__["forward"]
    assert isinstance(forward, SegmentedForward)
    bits(model, batch, 0)
    most = n_runs(solution.segments, len(model))
    # recomputing stops when everything has been saved again, so a region's last child may not run
    assert all(1 <= ran <= n for ran, n in zip(forward.n_runs, most, strict=True))
    assert sum(forward.n_runs) > len(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch[0]), copy.deepcopy(model)(batch[0]))


@pytest.mark.slow
def test_the_report_names_what_is_recomputed_together() -> None:
    model, batch = convolutions(inplace=True)
    solution, _ = planned(model, batch, 0.45)
    paths = next(region.modules for region in solution.segments if len(region.modules) > 1)
    assert f"checkpointed: {paths[0]} .. {paths[-1]} ({len(paths)} together)" in str(solution)
    assert "recomputed only together with those before them: 3" in str(solution)


@pytest.mark.slow
def test_children_with_hooks_are_not_put_together() -> None:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16), Branch()) for _ in range(6)
    )
    model = nn.Sequential(*blocks, nn.Linear(16, 10))
    batch = torch.randn(512, 16), torch.randint(0, 10, (512,))
    seen: list[int] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    solution, _ = planned(model, batch, 0.7)
    assert not solution.segments
    assert solution.checkpointed
    seen.clear()
    apply(model, solution)
    bits(model, batch, 0)
    assert len(seen) == 1


@pytest.mark.slow
def test_another_model_is_refused() -> None:
    model, batch = convolutions(inplace=False, n_layers=2)
    roomy = plan_chain(model, batch, budget="1GB", time_limit_s=600, **STEP)
    budget = int(0.8 * roomy.simulation.peak_bytes)
    solution = plan_chain(model, batch, budget=budget, time_limit_s=600, **STEP)
    assert solution.segments
    longer = nn.Sequential(*model, nn.Identity())
    with pytest.raises(ValueError, match=r"nn\.Sequential as the model with \d+ children"):
        apply(longer, solution)


BRANCHING = (
    "self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))",
    """self.layers = nn.Sequential(*(
                nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(6)
            ))""",
)
LOOKS = (
    """for layer in self.layers:
            x = torch.relu(layer(x))
        return""",
    """x = self.layers(x)
        if x.sum().item() > 1e9:
            x = 2 * x
        return""",
)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "code"), [("20MB", 0), ("4MB", 0), ("100KB", 3)])
def test_the_command_plans_what_cannot_be_traced(tmp_path, capsys, budget, code) -> None:
    path = write_model(tmp_path, BRANCHING, LOOKS)
    assert (
        main(
            [
                "--budget",
                budget,
                "--device",
                "cpu",
                "--time-limit",
                "1",
                "--batch-size",
                "512",
                path,
            ]
        )
        == code
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "Planned by submodules, measured in eager mode: 6 submodules" in out
    assert re.match(r"Problem .* \(Net\) not traced ", out)
    assert "planned by whole submodules, which may cost more" in out
    assert "forward reads values that the step computes" in out
    assert "can be planned by its submodules" not in out  # that is what was done
    assert ("Kept:" in out) == (code == 0)
    assert ("smallest peak" in out) == (code == 3)
    assert not re.search(r"\d bytes\b", out)  # sizes have units
    assert ("Checkpointed: layers." in out) == (budget == "4MB")


def test_what_real_steps_cannot_say_is_named(tmp_path, capsys) -> None:
    path = write_model(tmp_path, BRANCHING, LOOKS)
    line = failed(capsys, "--budget", "1MB", "--device", "cpu", "--accumulate", path, code=4)
    remedy = "; leave out --accumulate, and the command plans the model by its submodules"
    assert line.endswith(remedy)
    assert "cannot be traced" in line
