"""Copies to the host and a disk around parts that cannot be traced: what such a part has saved
stays on the device, and so do its parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_solver.export import ExportError, to_saved_tensors_hooks
from graphs.host_state import parameter_loads
from scheduler_runtime import apply, fit
from scheduler_runtime.execute.copies import Pool
from scheduler_runtime.planned import Plan
from solver.schedule import Solution, Spill, Store
from solver.solving import solve
from tests.scheduler_runtime.test_opaque import ADAMW, peak_bytes, train
from tests.support.bitwise import assert_equal
from tests.support.opaque_models import PARTS, network
from tests.support.pools import made_pools

__all__ = ["made_pools"]

HOST: dict[str, Any] = {"host_budget": "1GB", "host_link": "2GB/s", "optimizer_state": "device"}


def planned(model: nn.Module, batch: Tensor, *, share: float = 0.5, **options: Any) -> Solution:
    """The plan with this share of the activations."""
    options = {"optimizer": ADAMW, **HOST, **options}
    free = solve(model, batch, budget="1GB", **options)
    resident_bytes = free.graph.resident_bytes
    budget = resident_bytes + int(share * (free.baseline.peak_bytes - resident_bytes))
    return solve(model, batch, budget=budget, **options)


def copied(solution: Solution, kind: type[Any] = Store) -> set[str]:
    return {op.storage for op in solution.schedule.ops if isinstance(op, kind)}


def not_copyable(solution: Solution) -> set[str]:
    return {tensor.name for tensor in solution.graph.tensors if not tensor.copyable}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", PARTS)
def test_copies_around_each_kind_of_part(name: str) -> None:
    plain, batch = network(name)
    model = copy.deepcopy(plain)
    solution = planned(model, batch)
    assert copied(solution)
    assert copied(solution).isdisjoint(not_copyable(solution))
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))
    assert peak_bytes(model, batch) <= solution.request.available_bytes


def test_what_a_part_has_saved_and_its_parameters_are_not_copyable() -> None:
    model, batch = network("autograd function", n_blocks=1)
    solution = solve(model, batch, budget="1GB")
    graph = solution.graph
    forward = next(node for node in graph.nodes if node.op.startswith("opaque_forward"))
    parameters = graph.meta.parameters.items()
    of_part = {tensor for name, tensor in parameters if name.startswith("parts.0.")}
    assert len(of_part) == 4
    expected = of_part | {forward.outputs[-1]}
    assert not_copyable(solution) == expected


@pytest.mark.slow
def test_a_disk(tmp_path: Path) -> None:
    plain, batch = network("experts")
    model = copy.deepcopy(plain)
    disk = {"disk_budget": f"1GB:{tmp_path}", "disk_rate": "5GB/s", "host_budget": "300KB"}
    solution = planned(model, batch, host_link="50GB/s", **disk)
    assert copied(solution, Spill)
    assert copied(solution).isdisjoint(not_copyable(solution))
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))


@pytest.mark.slow
def test_fit(made_pools: list[Pool]) -> None:
    plain, batch = network("experts")
    model = copy.deepcopy(plain)
    budget = planned(plain, batch, optimizer=None).request.budget_bytes
    fit(model, budget=budget, optimizer=[], host_budget="1GB", host_link="2GB/s")
    assert_equal(train(plain, batch), train(model, batch))
    assert made_pools[0].host.numel()


@pytest.mark.slow
def test_parameters_of_other_modules_may_be_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1024)
    plain, batch = network("experts", n_blocks=2)
    model = copy.deepcopy(plain)
    options = {**HOST, "optimizer_state": "host", "parameters": "host"}
    solution = solve(model, batch, budget="1GB", optimizer=ADAMW, **options)
    on_host = Plan.of(solution).host_parameters
    assert "mlps.0.0.weight" in on_host
    assert not any(name.startswith("parts.") for name in on_host)
    optimizers = [ADAMW(each.parameters(), lr=1e-2) for each in (plain, model)]
    apply(model, solution, optimizer=optimizers[1])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            each(batch).backward()
            optimizer.step()
    assert_equal([*plain.state_dict().values()], [*model.state_dict().values()])


def test_hooks_of_saved_tensors_are_refused() -> None:
    model, batch = network("NumPy", n_blocks=1)
    solution = solve(model, batch, budget="1GB", **HOST)
    with pytest.raises(ExportError, match=r"planned as one piece \(parts.0\)"):
        to_saved_tensors_hooks(model, solution)
