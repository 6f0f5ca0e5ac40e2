"""Plans with parameters on the host: bits, bytes, and what else reads parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from checkpoint_solver import (
    PlanMismatchError,
    apply,
    parameters_on_device,
    remove,
    solve,
    verify,
)
from graphs.host_state import parameter_loads
from graphs.training_step import state_buckets
from graphs.zero import Zero
from scheduler_runtime.host_memory import host_blocks, hosted_parameters
from scheduler_runtime.host_memory.parameters import _HOST_PARAMETERS, HostParameters
from scheduler_runtime.measuring import measure
from scheduler_runtime.planned import Plan
from solver.schedule import Link, Place, Places, Solution, Store, keep, simulate
from solver.sizes_deadlines_progress import BudgetError
from tests.scheduler_runtime.host_memory.test_planned_host_state import (
    HOST,
    WEIGHT_BYTES,
    Net,
    adamw,
    alike,
    batch,
    sgd,
    train,
)
from tests.support.schedules_with_copies import random_copies

TIGHT = WEIGHT_BYTES * 5 // 2


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layer, as in large models."""
    monkeypatch.setattr(state_buckets, "LEAST_BUCKET_BYTES", 1)
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1024)


class Tied(nn.Module):
    """An embedding that is the head as well, dropout, batch norm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(500, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.up = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.down = nn.Linear(256, 64)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.table(x)))
        h = h + self.down(self.drop(torch.relu(self.norm(self.up(h)))))
        return nn.functional.cross_entropy(self.head(h), x)


def tokens(n: int = 48) -> torch.Tensor:
    return torch.randint(500, (n,), generator=torch.Generator().manual_seed(n))


@functools.cache
def planned(make: Any = adamw, **options: Any) -> Solution:
    options = {"budget": TIGHT, "parameters": "auto", **HOST, **options}
    return solve(Net(), batch(), optimizer=make, **options)


def away_bytes(model: nn.Module) -> int:
    """Of parameters that have given their memory up."""
    return sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes() < p.nbytes)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_plan_keeps_its_bytes_and_the_bits(make: Any) -> None:
    solution = planned(make, budget=TIGHT if make is adamw else WEIGHT_BYTES * 9 // 4)
    n_states = 2 if make is adamw else 1
    assert solution.graph.host_state_bytes == (1 + n_states) * WEIGHT_BYTES
    plain, model = Net(), Net()
    without, optimizer = make(plain.parameters()), make(model.parameters())
    train(plain, without, 64, 64, 64)
    apply(model, solution, optimizer=optimizer)
    train(model, optimizer, 64, 64, 64)
    assert away_bytes(model) == WEIGHT_BYTES
    assert _HOST_PARAMETERS[model].host_bytes == WEIGHT_BYTES
    found = measure(model, batch(), optimizer=optimizer, n_steps=1)
    train(plain, without, 64, 64, 64)
    predicted_bytes = solution.simulation.peak_bytes
    scalars = 16 + 4 * 8  # the loss and its gradient; the NaN in the place of each parameter
    assert 0.9 * predicted_bytes < found.peak_bytes <= predicted_bytes + scalars
    assert alike(plain.state_dict(), model.state_dict())
    assert away_bytes(model) == 0
    assert alike(without.state_dict(), optimizer.state_dict())
    train(plain, without, 64)
    train(model, optimizer, 64)
    assert away_bytes(model) == WEIGHT_BYTES
    remove(model)
    assert away_bytes(model) == 0
    assert not host_blocks(optimizer)
    assert alike(plain.state_dict(), model.state_dict())
    train(plain, without, 64)
    train(model, optimizer, 64)
    assert alike(plain.state_dict(), model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [True, False])
def test_tied_frozen_random_and_accumulated(accumulate: bool) -> None:
    gradients = "accumulate" if accumulate else "fresh"
    options: dict[str, Any] = {"parameters": "host", "gradients": gradients, **HOST}
    solution = solve(Tied(), tokens(), optimizer=adamw, budget="1GB", **options)
    loads = [name for name in solution.schedule.order if name.startswith("load.")]
    assert len(set(loads)) == 7  # not the two biases of 64 numbers
    results = []
    for is_planned in (False, True):
        model = Tied()
        optimizer = adamw(model.parameters())
        if accumulate:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        if is_planned:
            apply(model, solution, optimizer=optimizer)
        torch.manual_seed(7)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=not accumulate)
            for _ in range(1 + accumulate):
                model(tokens()).backward()
            optimizer.step()
        assert (away_bytes(model) > 0) == is_planned
        gradients_of = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((copy_of(model.state_dict()), optimizer.state_dict(), gradients_of))
    assert alike(list(results[0]), list(results[1]))


def after_training(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """What three steps make of the model."""
    torch.manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens()).backward()
        optimizer.step()
    return copy_of(model.state_dict())


def copy_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.slow
def test_nothing_fits_without() -> None:
    assert planned(parameters="device").simulation is None
    assert planned(parameters="device", optimizer_state="host").simulation is None
    assert planned(budget=WEIGHT_BYTES * 2).simulation is None  # gradients and three buckets


@pytest.mark.slow
def test_it_is_on_the_host_where_asked() -> None:
    assert planned(budget="10GB").graph.host_state_bytes == 0
    forced = planned(budget="10GB", parameters="host")
    assert forced.graph.host_state_bytes == 3 * WEIGHT_BYTES
    assert forced.overhead > 0
    some = planned(budget=WEIGHT_BYTES * 3)
    assert 2 * WEIGHT_BYTES < some.graph.host_state_bytes < 3 * WEIGHT_BYTES
    with pytest.raises(BudgetError, match=r"parameters and the optimizer's state take 6\.29 MB"):
        planned(parameters="host", host_budget="5MB")
    with pytest.raises(ValueError, match="parameters is 'host', and there is no host"):
        solve(Net(), batch(), budget="10GB", optimizer=adamw, parameters="host")
    with pytest.raises(ValueError, match="parameters is 'disk'; one of auto, device, host"):
        planned(parameters="disk")
    with pytest.raises(ValueError, match="leave the device with the optimizer's state"):
        planned(parameters="host", optimizer_state="device")
    with pytest.raises(BudgetError, match=r"^the parameters .* the step has no optimizer"):
        planned(None, parameters="host")
    with pytest.raises(BudgetError, match=r"^the parameters cannot be on .*: DeepSpeed has it"):
        solve(
            Net(),
            batch(),
            budget="10GB",
            optimizer=adamw,
            host_budget="1GB",
            host_link="10GB/s",
            parameters="host",
            zero=Zero(stage=1, n_ranks=2),
        )


@pytest.mark.slow
def test_small_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.cache_clear()
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 2**20)
    with pytest.raises(BudgetError, match="no parameter can be on the host: each is small"):
        planned(parameters="host", budget="10GB")


@pytest.mark.slow
def test_a_saved_plan_runs(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    solution = planned()
    solution.save(path)
    for graph in (solution.graph, solution.plain):
        loaded = Solution.load(path, graph=graph)
        assert loaded.graph == solution.graph
        assert loaded.simulation == solution.simulation
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    apply(model, path, optimizer=optimizer)
    train(plain, without, 64, 64)
    train(model, optimizer, 64, 64)
    assert alike(plain.state_dict(), model.state_dict())
    with pytest.raises(PlanMismatchError, match="shape"):
        model(batch(32))


@pytest.mark.slow
def test_checkpoints_evaluation_and_changes() -> None:
    """Whatever reads all parameters: their values come back for it."""
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    for net, own in ((plain, without), (model, optimizer)):
        train(net, own, 64)
        with torch.no_grad():
            assert torch.isfinite(net(batch(3)))
        train(net, own, 64)
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        train(net, own, 64)
        net.load_state_dict(torch.load(file))
        train(net, own, 64)
        loss = net(batch())
        assert len(net.state_dict()) == 8  # between forward and backward
        loss.backward()
        own.step()
        with parameters_on_device(net), torch.no_grad():
            net.layers[3].weight.mul_(0.5)
        with parameters_on_device(net):
            train(net, own, 64)
            assert away_bytes(net) == 0
        train(net, own, 64)
    assert away_bytes(model) == WEIGHT_BYTES
    assert alike(plain.state_dict(), model.state_dict())


def test_without_its_value_a_parameter_is_not_a_number() -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    train(model, optimizer, 64)
    weight = model.layers[0].weight
    assert weight.isnan().all()
    assert weight.shape == (256, 256)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"cannot be copied or pickled.*state_dict"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        pickle.dumps(model)
    weight.data = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match=r"'layers\.0\.weight' was replaced"):
        model.state_dict()


@pytest.mark.slow
def test_what_a_plan_refuses() -> None:
    solution, model = planned(), Net()
    with pytest.raises(ValueError, match="fixed addresses"):
        hosted_parameters(model, [Plan.of(solution)], cuda_graph=True)
    other = planned(budget="10GB", optimizer_state="host", parameters="device")
    with pytest.raises(ValueError, match="different parameters in host memory"):
        apply(model, [solution, other], optimizer=adamw(model.parameters()))
    model.layers[2].weight.data = model.layers[2].weight.data.t()
    with pytest.raises(ValueError, match=r"'layers\.2\.weight'.*not contiguous"):
        apply(model, solution, optimizer=adamw(model.parameters()))


@pytest.mark.slow
def test_an_error_in_the_optimizer_loses_no_value() -> None:
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    train(plain, without, 64)
    train(model, optimizer, 64)
    last = [*model.parameters()][5]
    kept = optimizer.state[last].pop("exp_avg")
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.state[last]["exp_avg"] = kept
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    untouched = [*model.parameters()][7]
    assert torch.equal(untouched, [*plain.parameters()][7])


@pytest.mark.slow
def test_it_is_verified() -> None:
    found = verify(planned(), model=Net, batch=batch, optimizer=adamw)
    assert found.passed, found


@pytest.mark.slow
def test_parameters_in_two_groups_of_sgd_with_momentum() -> None:
    solution = None
    results = []
    for is_planned in (False, True):
        model = Tied()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = optim.SGD(
            [{"params": parameters[1::2], "lr": 0.1}, {"params": parameters[::2], "lr": 0.01}],
            momentum=0.9,
        )
        if is_planned:
            options: dict[str, Any] = {"parameters": "host", **HOST}
            solution = solve(model, tokens(), optimizer=optimizer, budget="1GB", **options)
            apply(model, solution, optimizer=optimizer)
        results.append(after_training(model, optimizer))
    assert alike(*results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_that_copy_parameters_once_more(seed: int, tmp_path: Path) -> None:
    """Loaded parameters are stored and fetched like other storages, by way of a disk too."""
    rng = random.Random(seed)
    solution = solve(Tied(), tokens(), optimizer=adamw, budget="1GB", parameters="host", **HOST)
    graph = solution.graph
    storages = [name for name in graph.producer if graph.root(name) == name]
    kept = [name for name in storages if rng.random() < 0.6]
    schedule = random_copies(graph, keep(graph, kept), rng)
    assert any(isinstance(op, Store) and op.storage.startswith("primals") for op in schedule.ops)
    assert sum(name.startswith("load.") for name in schedule.order) > 7
    link = Link(1e9, 1e9)
    places = Places(host=Place(10**9, link), disk=Place(10**9, link))
    planned = dataclasses.replace(
        solution,
        schedule=schedule,
        simulation=simulate(graph, schedule, places=places),
        request=dataclasses.replace(solution.request, places=places),
    )
    results = []
    for plan in (None, planned):
        model = Tied()
        optimizer = adamw(model.parameters())
        if plan is not None:
            apply(model, plan, optimizer=optimizer, disk_directory=tmp_path)
        results.append(after_training(model, optimizer))
    assert alike(*results)


@pytest.mark.slow
def test_no_room_to_bring_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan stays as it is, with the optimizer's state on the host, and the training goes on."""
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    train(plain, without, 64)
    train(model, optimizer, 64)

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(HostParameters, "fetch", short)
        with pytest.raises(torch.OutOfMemoryError):
            remove(model)
    assert host_blocks(optimizer)
    train(plain, without, 64)
    train(model, optimizer, 64)
    remove(model)
    assert not host_blocks(optimizer)
    assert alike(plain.state_dict(), model.state_dict())
