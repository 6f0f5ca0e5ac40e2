"""A plan's copies as hooks of saved tensors: bits, bytes, what is lost, and what is refused."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from checkpoint_solver import remove, solve, trace
from checkpoint_solver.export import ExportError, to_saved_tensors_hooks, to_torch_checkpoint
from scheduler_runtime.execute import saved_on_host
from scheduler_runtime.execute.torch_checkpoint import CountMismatchError
from scheduler_runtime.measuring import measure
from solver.schedule import Solution, Store
from tests.support.bitwise import assert_equal
from tests.support.budgets import budget_above_resident
from tests.support.plain_simulator import assert_simulators_agree

HOST: dict[str, Any] = {"host_budget": "1GB", "host_link": "10GB/s"}
SLOW = {**HOST, "host_link": "0.5GB/s"}


class Net(nn.Module):
    """Views, an operator in place, dropout, batch norm, and two readers of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 128)
        self.norm = nn.BatchNorm1d(128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.norm(self.up(x)), inplace=True)
        for layer in self.layers:
            y = layer(x)
            x = x + self.drop(torch.tanh(y) * torch.sigmoid(y)).view(-1, 2, 64).flatten(1)
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


@functools.cache
def planned(*, recompute: bool) -> Solution:
    """At half of the activations, with copies alone or with both."""
    model = Net()
    graph = trace(model, batch())
    budget = budget_above_resident(graph, 0.5)
    if recompute:
        return solve(model, batch(), budget=budget, rewrites="none", **SLOW)
    nodes = tuple(replace(node, recomputable=False) for node in graph.nodes)
    return solve(replace(graph, nodes=nodes), budget=budget, **HOST)


@pytest.fixture
def host_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the host's memory is the device's: copies that PyTorch does not count."""
    monkeypatch.setattr(
        saved_on_host,
        "host_memory",
        lambda source: torch.from_numpy(np.empty(source.shape, np.uint8)),
    )


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(batch())
    loss.backward()
    gradients = (p.grad.clone() for p in model.parameters() if p.grad is not None)
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_the_same_bits_in_less_memory(recompute: bool, host_apart: None) -> None:
    plain, model = Net(), Net()
    exported = to_saved_tensors_hooks(model, planned(recompute=recompute), on_excess="least")
    assert exported.storages
    for _ in range(2):
        assert_equal(step(model), step(plain))
    places = planned(recompute=recompute).request.places
    graph = planned(recompute=recompute).unplanned
    assert assert_simulators_agree(graph, exported.schedule, places)
    measured, without = (measure(each, batch()).peak_bytes for each in (model, plain))
    assert measured < without - exported.host_bytes / 2
    assert measured <= exported.peak_bytes + 100_000
    exported.remove()
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_what_it_says() -> None:
    solution = planned(recompute=False)
    model = Net()
    exported = to_saved_tensors_hooks(model, solution, on_excess="least")
    copied = {
        op.storage for op in (solution.schedule or exported.schedule).ops if type(op) is Store
    }
    assert set(exported.storages) <= {solution.unplanned.root(name) for name in copied}
    assert exported.overhead > solution.overhead
    assert "longer waits for copies than in the plan" in str(exported)
    assert f"{len(exported.storages)} tensors" in str(exported)
    with torch.no_grad():
        model(batch())
    copied_model = copy.deepcopy(model)
    remove(model)
    assert_equal(step(copied_model), step(model))


@pytest.mark.slow
def test_what_was_recomputed_stays_saved() -> None:
    tight = planned(recompute=True)
    assert tight.simulation.n_recomputed
    with pytest.raises(ExportError, match="hooks of saved tensors recompute nothing"):
        to_saved_tensors_hooks(Net(), tight)
    exported = to_saved_tensors_hooks(Net(), tight, on_excess="least")
    assert not exported.fits
    assert "not recomputed" in str(exported)
    assert "ABOVE THE BUDGET" in str(exported)


@pytest.mark.slow
def test_what_is_refused() -> None:
    solution, model = planned(recompute=True), Net()
    with pytest.raises(ValueError, match="on_excess is 'most'"):
        to_saved_tensors_hooks(model, solution, on_excess="most")
    alone = solve(model, batch(), budget="1GB", rewrites="none")
    with pytest.raises(ExportError, match="copies nothing to the host"):
        to_saved_tensors_hooks(model, alone)
    nothing = solve(model, batch(), budget="1KB", rewrites="none", reserve=0)
    with pytest.raises(ExportError, match="no schedule to export"):
        to_saved_tensors_hooks(model, nothing)
    to_saved_tensors_hooks(model, solution, on_excess="least")
    with pytest.raises(ExportError, match="exported to this model already"):
        to_torch_checkpoint(model, solution)
    model.layers = model.layers[:2]
    with pytest.raises(CountMismatchError, match="runs a different program"):
        model(batch())


def test_torchs_policy_of_offload_recomputes() -> None:
    """Why no plan is exported to it: one product forward, another of its gradient, and it again."""
    weight, calls = torch.randn(8, 8, requires_grad=True), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend([op] if op is torch.ops.aten.mm.default else [])
            return op(*args, **(kwargs or {}))

    def n_products(policy: CheckpointPolicy) -> int:
        def decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return policy if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        calls.clear()
        with Products():
            found = checkpoint(
                lambda x: torch.sigmoid(torch.mm(x, weight)).sin(),
                torch.randn(8, 8),
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(decide),
            )
            found.sum().backward()
        return len(calls)

    assert n_products(CheckpointPolicy.MUST_SAVE) == 2
    assert n_products(CheckpointPolicy.MUST_CPU_OFFLOAD) == 3
