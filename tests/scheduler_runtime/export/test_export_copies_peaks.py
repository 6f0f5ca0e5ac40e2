"""Peaks of a step under hooks of saved tensors, for chosen storages on the host."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint_solver import solve
from checkpoint_solver.export import ExportedCopies, to_saved_tensors_hooks
from scheduler_runtime.execute import saved_on_host
from scheduler_runtime.measuring import measure
from solver.schedule import Schedule, Solution, Store


@pytest.fixture(autouse=True)
def host_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the host's memory is the device's: copies that PyTorch does not count."""
    monkeypatch.setattr(
        saved_on_host,
        "host_memory",
        lambda source: torch.from_numpy(np.empty(source.shape, np.uint8)),
    )


def planned(model: nn.Module, batch: torch.Tensor) -> Solution:
    """With enough memory for the plain step."""
    return solve(model, batch, budget="1GB", rewrites="none", host_budget="1GB", host_link="1GB/s")


def with_copies(model: nn.Module, solution: Solution, *names: str) -> ExportedCopies:
    """Export a plan that copies these tensors to the host."""
    assert solution.schedule is not None
    ops = (*solution.schedule.ops, *map(Store, names))
    schedule = Schedule(ops=ops, graph_id=solution.schedule.graph_id)
    copying = dataclasses.replace(solution, schedule=schedule)
    return to_saved_tensors_hooks(model, copying, on_excess="least")


class InPlace(nn.Module):
    """Each operator writes its result over what the one before it has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.relu(layer(x), inplace=True)
        return x.square().mean()


class Variables(nn.Module):
    """A large operator runs while variables hold what it does not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.1)  # hooks keep no random state, as they recompute nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (layer(x).sin() for layer in self.layers)
        mixed = query.cos() * key.cos() * self.drop(value.cos())
        large = torch.cat([mixed] * 8, 1).exp()
        return large.mean() + (query + key + value).mean()


class Recurrent(nn.Module):
    """Recurrent cells, dropout in place, and sums of several readers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x), []
        for _ in range(4):
            state = self.cell(x, state)
            states.append(state)
            x = x + self.head(state).sigmoid_()
        return torch.stack(states).pow(3).mean() + x.square().mean()


BATCH = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", ["addmm", "relu"])
def test_what_an_operator_in_place_returns_is_on_the_storage_that_it_overwrites(op: str) -> None:
    model = InPlace()
    exported = with_copies(model, planned(model, BATCH), op, f"{op}_1", f"{op}_2")
    assert exported.storages == ("addmm", "addmm_1", "addmm_2")
    assert exported.host_bytes == 3 * BATCH.nbytes
    assert abs(measure(model, BATCH).peak_bytes - exported.peak_bytes) <= 100


def test_a_storage_stays_as_long_as_a_variable_of_forward_holds_it() -> None:
    model = Variables()
    exported = with_copies(model, planned(model, BATCH), "sin", "sin_1", "sin_2")
    assert abs(measure(model, BATCH).peak_bytes - exported.peak_bytes) <= 100


def test_what_cannot_leave_the_device_is_not_counted_as_copied() -> None:
    """The output is written over a result that the plan would copy."""

    class WithOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = nn.functional.relu(self.layers[0](x), inplace=True)
            return {"loss": self.layers[1](hidden).sin().mean(), "hidden": hidden}

    model = WithOutput()
    exported = with_copies(model, planned(model, BATCH), "addmm", "addmm_1")
    assert exported.storages == ("addmm_1",)
    assert "1 tensor that the plan copies: not saved by autograd" in exported.lost
    assert abs(measure(model, BATCH).peak_bytes - exported.peak_bytes) <= 100


def copied_at_random(model: nn.Module, batch: torch.Tensor, seed: int) -> ExportedCopies:
    solution = planned(model, batch)
    graph = solution.plain
    made = [name for node in graph.forward_nodes for name in node.outputs]
    names = [name for name in made if graph.root(name) == name]
    chosen = random.Random(seed).sample(names, len(names) // 2)
    return with_copies(model, solution, *chosen)


@pytest.mark.parametrize("kind", [InPlace, Variables])
def test_any_choice_of_storages(kind: type[nn.Module]) -> None:
    model = kind()
    exported = copied_at_random(model, BATCH, seed=0)
    assert exported.storages
    assert abs(measure(model, BATCH).peak_bytes - exported.peak_bytes) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_what_variables_of_recurrent_cells_hold_is_bounded(seed: int) -> None:
    """A GRU is traced as several operators, so no rehearsal says what its variables hold."""
    model, batch = Recurrent(), BATCH[:, :32].contiguous()
    exported = copied_at_random(model, batch, seed)
    assert exported.storages
    measured_bytes = measure(model, batch).peak_bytes
    assert measured_bytes <= exported.peak_bytes <= 1.2 * measured_bytes
