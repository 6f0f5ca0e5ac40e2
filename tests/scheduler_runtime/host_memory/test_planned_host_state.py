"""Plans with the optimizer's state on the host: `solve` and `apply`, and `fit`."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing as mp
from torch import nn, optim

from checkpoint_solver import FitError, apply, fit, plans_of, remove, solve
from graphs.training_step import state_buckets
from scheduler_runtime.host_memory import host_blocks, optimizer_state
from scheduler_runtime.measuring import measure
from solver.schedule import Solution
from solver.sizes_deadlines_progress import BudgetError
from tests.support import host_state_ranks

WIDTH, N_LAYERS = 256, 8
WEIGHT_BYTES = N_LAYERS * WIDTH * WIDTH * 4
HOST: dict[str, Any] = {"host_budget": "1GB", "host_link": "100GB/s"}

adamw = functools.partial(optim.AdamW, lr=1e-2)
sgd = functools.partial(optim.SGD, lr=1e-2, momentum=0.9)


class Net(nn.Module):
    """Little is saved for backward, and there is much state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def batch(n: int = 64) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layer, as in large models."""
    monkeypatch.setattr(state_buckets, "LEAST_BUCKET_BYTES", 1)


def tight_bytes(make: Any) -> int:
    """No room for parameters, gradients and state at once, but for half of the state."""
    return (
        WEIGHT_BYTES * 5 // 2
        if make is sgd or "foreach" in getattr(make, "keywords", {})
        else WEIGHT_BYTES * 7 // 2
    )


def planned(make: Any = adamw, **options: Any) -> Solution:
    options = {"budget": tight_bytes(make), **HOST, **options}
    return solve(Net(), batch(), optimizer=make, **options)


def train(model: nn.Module, optimizer: optim.Optimizer, *sizes: int) -> None:
    for size in sizes:
        optimizer.zero_grad()
        model(batch(size)).backward()
        optimizer.step()


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def host_bytes(optimizer: optim.Optimizer) -> int:
    return sum(block.nbytes for block in host_blocks(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [adamw, sgd, functools.partial(adamw, fused=True), functools.partial(sgd, foreach=True)]
)
def test_a_plan_keeps_its_bytes_and_the_bits(make: Any) -> None:
    solution = planned(make)
    assert solution.graph.host_state_bytes >= WEIGHT_BYTES
    plain, model = Net(), Net()
    without, optimizer = make(plain.parameters()), make(model.parameters())
    train(plain, without, 64, 64, 64)
    apply(model, solution, optimizer=optimizer)
    train(model, optimizer, 64, 64, 64)
    assert alike(plain.state_dict(), model.state_dict())
    assert alike(without.state_dict(), optimizer.state_dict())
    assert host_bytes(optimizer) == solution.graph.host_state_bytes
    found = measure(model, batch(), optimizer=optimizer, n_steps=1)
    predicted_bytes = solution.simulation.peak_bytes
    scalars = 16  # the loss and its gradient are still there when the optimizer steps
    assert 0.9 * predicted_bytes < found.peak_bytes <= predicted_bytes + scalars
    assert predicted_bytes <= tight_bytes(make)
    remove(model)
    assert host_bytes(optimizer) == 0


@pytest.mark.slow
def test_nothing_fits_without() -> None:
    assert planned(optimizer_state="device", host_budget="1GB").simulation is None
    assert solve(Net(), batch(), budget=tight_bytes(adamw), optimizer=adamw).simulation is None


@pytest.mark.slow
def test_it_is_on_the_host_where_asked() -> None:
    forced = planned(budget="10GB", optimizer_state="host")
    assert forced.graph.host_state_bytes == 2 * WEIGHT_BYTES
    assert forced.overhead > 0
    assert planned(budget="10GB").graph.host_state_bytes == 0
    with pytest.raises(BudgetError, match=r"takes 4\.19 MB .* of host memory, more than the 1\.00"):
        planned(budget="10GB", optimizer_state="host", host_budget="1MB")
    with pytest.raises(ValueError, match="there is no host; give host_budget"):
        solve(Net(), batch(), budget="10GB", optimizer=adamw, optimizer_state="host")
    with pytest.raises(ValueError, match="optimizer_state is 'disk'; one of auto, device, host"):
        planned(optimizer_state="disk")
    own = type("Own", (optim.Adam,), {})
    with pytest.raises(BudgetError, match="Own is not one of torch's optimizers that step each"):
        planned(own, budget="10GB", optimizer_state="host")
    with pytest.raises(BudgetError, match="the step has no optimizer"):
        planned(None, budget="10GB", optimizer_state="host")


@pytest.mark.slow
def test_a_plan_wants_the_optimizer() -> None:
    solution, model = planned(), Net()
    with pytest.raises(ValueError, match=r"apply\(model, plan, optimizer=optimizer\)"):
        apply(model, solution)
    with pytest.raises(ValueError, match=r"trains 8 tensors, and this AdamW trains 3; plan again"):
        apply(model, solution, optimizer=adamw([*model.parameters()][:3]))
    with pytest.raises(ValueError, match="the plans are for different steps"):
        apply(model, [solution, planned(budget="10GB")], optimizer=adamw(model.parameters()))
    assert "forward" not in model.__dict__
    on_device = planned(budget="10GB")
    optimizer = adamw(model.parameters())
    apply(model, on_device, optimizer=optimizer)
    assert "step" not in optimizer.__dict__


@pytest.mark.slow
def test_a_saved_plan_runs(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    planned().save(path)
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    train(plain, without, 64, 30, 64)
    with pytest.raises(ValueError, match="the optimizer's state on the host"):
        apply(model, path)
    apply(model, path, optimizer=optimizer)
    train(model, optimizer, 64, 30, 64)  # the smaller one is planned for, with the state away
    assert alike(plain.state_dict(), model.state_dict())
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES


@pytest.mark.slow
def test_fit_moves_the_state() -> None:
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    fit(model, budget=tight_bytes(adamw), optimizer=optimizer, **HOST)
    train(plain, without, 64, 40, 64)
    train(model, optimizer, 64)
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES
    scheduler.step()
    train(model, optimizer, 40, 64)
    assert alike(plain.state_dict(), model.state_dict())
    assert [each.solution.graph.host_state_bytes for each in plans_of(model)] == [
        2 * WEIGHT_BYTES
    ] * 2
    found = measure(model, batch(), optimizer=optimizer, n_steps=1)  # three steps
    assert found.peak_bytes <= tight_bytes(adamw)
    remove(model)
    assert host_bytes(optimizer) == 0
    train(plain, without, 64, 64, 64, 64)
    train(model, optimizer, 64)
    assert alike(plain.state_dict(), model.state_dict())
    assert alike(without.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.slow
def test_fit_accumulates() -> None:
    """Of both kinds of call, the one with gradients from before needs the state away."""
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    fit(model, budget=tight_bytes(adamw) + WEIGHT_BYTES // 2, optimizer=optimizer, **HOST)
    for net, own in ((plain, without), (model, optimizer)):
        for _ in range(2):
            own.zero_grad()
            for size in (64, 64, 64):
                net(batch(size)).backward()
            own.step()
    assert alike(plain.state_dict(), model.state_dict())
    assert alike(without.state_dict(), optimizer.state_dict())
    assert len(plans_of(model)) == 2
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES


@pytest.mark.slow
def test_fit_leaves_it_where_it_has_no_optimizer_of_its_own() -> None:
    for given in ("AdamW", adamw, [adamw, sgd]):
        model = Net()
        fit(model, budget="1GB", optimizer=given, **HOST)
        train(model, adamw(model.parameters()), 64)
        (plan,) = plans_of(model)
        assert plan.solution.request.optimizer_state == "device"
        with pytest.raises(ValueError, match="fit needs the optimizer that trains the model"):
            fit(Net(), budget="1GB", optimizer=given, optimizer_state="host", **HOST)
    with pytest.raises(ValueError, match="there is no host"):
        fit(Net(), budget="1GB", optimizer=adamw(Net().parameters()), optimizer_state="host")


@pytest.mark.slow
def test_a_copy_of_the_model_leaves_the_optimizer_alone() -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    train(model, optimizer, 64)
    remove(copy.deepcopy(model))
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES


@pytest.mark.distributed
def test_ranks_that_accumulate_have_the_same_bits(tmp_path: Path) -> None:
    mp.spawn(host_state_ranks.run, (str(tmp_path),), nprocs=host_state_ranks.N_RANKS)
    for rank in range(host_state_ranks.N_RANKS):
        without, planned = torch.load(tmp_path / f"rank{rank}.pt")
        assert alike(without["parameters"], planned["parameters"])
        assert alike(without["state"], planned["state"])
        assert without["host_bytes"] == 0
        assert planned["host_bytes"] == 2 * host_state_ranks.WEIGHT_BYTES


@pytest.mark.slow
def test_two_models_share_an_optimizer() -> None:
    """Whoever goes first leaves the other's state where its plan has it."""
    both = [Net(), Net()]
    optimizer = adamw([p for model in both for p in model.parameters()])
    batches = {"optimizer_state": "host", "budget": "1GB", **HOST}
    for model in both:
        fit(model, optimizer=optimizer, **batches)
        with pytest.warns(UserWarning, match="and 8 others"):
            train(model, optimizer, 64)
    third = Net()
    fit(third, optimizer=optimizer, budget="1GB")  # never wanted it there
    remove(third)
    assert host_bytes(optimizer) == 4 * WEIGHT_BYTES
    remove(both[0])
    assert host_bytes(optimizer) == 4 * WEIGHT_BYTES
    train(both[1], optimizer, 64)
    remove(both[1])
    assert host_bytes(optimizer) == 0


def test_a_part_that_the_training_calls_gives_the_state_back() -> None:
    whole = nn.Sequential(Net())
    optimizer = adamw(whole.parameters())
    fit(whole, budget="1GB", optimizer=optimizer, optimizer_state="host", **HOST)
    part = whole[0]
    assert isinstance(part, nn.Module)
    train(part, optimizer, 64)
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES
    remove(whole)
    assert host_bytes(optimizer) == 0


@pytest.mark.slow
def test_a_copy_says_that_it_has_no_optimizer() -> None:
    fitted, applied = Net(), Net()
    optimizers = [adamw(model.parameters()) for model in (fitted, applied)]
    fit(fitted, budget="1GB", optimizer=optimizers[0], optimizer_state="host", **HOST)
    apply(applied, planned(), optimizer=optimizers[1])
    for model, optimizer in zip((fitted, applied), optimizers, strict=True):
        train(model, optimizer, 64)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                other(batch())
            with pytest.raises((RuntimeError, FitError), match=r"is a copy of .* the original"):
                other(batch())
            remove(other)
            other(batch()).backward()
        train(model, optimizer, 64)


@pytest.mark.slow
def test_no_room_to_bring_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the state is; nothing is lost, and the training goes on."""
    plain, model = Net(), Net()
    without, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    apply(model, planned(), optimizer=optimizer)
    train(plain, without, 64)
    train(model, optimizer, 64)
    fetch, n_fetched = optimizer_state._Bucket.fetch, iter(range(3))

    def short(*arguments: Any) -> None:
        if next(n_fetched, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        fetch(*arguments)

    monkeypatch.setattr(optimizer_state._Bucket, "fetch", short)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        remove(model)
    assert "all of the optimizer's state is still in host memory" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert host_bytes(optimizer) == 2 * WEIGHT_BYTES
    train(plain, without, 64, 64)
    train(model, optimizer, 64)
    remove(model)
    assert host_bytes(optimizer) == 0
    train(model, optimizer, 64)
    assert alike(plain.state_dict(), model.state_dict())
    assert alike(without.state_dict(), optimizer.state_dict())
