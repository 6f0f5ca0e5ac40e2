"""Optimizers with their state on the host: the bits of the step, and what is where."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from graphs.costs import default_costs
from graphs.host_state import StateBucket, streamed_workspace_bytes
from graphs.training_step import optimizer_costs, state_buckets
from scheduler_runtime.host_memory import bring_back, host_blocks, keep_on_host
from scheduler_runtime.measuring import bytes_of, peak_above_bytes, resident_tensors

CPU = torch.device("cpu")
N_STEPS = 4
SCALARS_BYTES = 1024
"""That real kernels wrap into tensors for a moment; on fake tensors they do not exist."""
OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.Adam: [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"capturable": False}],
    optim.AdamW: [{"lr": torch.tensor(1e-3)}, {"foreach": True}, {"fused": True, "amsgrad": True}],
    optim.SGD: [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"momentum": 0.9, "fused": True},
    ],
    optim.Adagrad: [{}, {"fused": True}, {"foreach": True}],
    optim.Adafactor: [{"lr": 1e-2}],
    optim.RMSprop: [{"momentum": 0.9, "centered": True}, {"foreach": True}],
}
CASES = [
    (make, options)
    for make in state_buckets.BY_PARAMETER
    for options in OPTIONS.get(make, [{}, {"foreach": True}])
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 40),
        nn.Tanh(),
        nn.Linear(40, 1),
    )


def groups(net: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Two groups with different options, as of decayed and other parameters."""
    named = list(net.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, **options},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, **options},
    ]


def made(make: type[optim.Optimizer], options: dict[str, Any]) -> tuple[nn.Module, optim.Optimizer]:
    net = model()
    if make is optim.Rprop:  # knows no decay
        return net, make(net.parameters(), **options)
    return net, make(groups(net), **options)


def train(net: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for index in steps:
        torch.manual_seed(100 + index)
        optimizer.zero_grad()
        net(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Tensors by their bits, wherever they are, and what holds them."""
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        return alike and torch.equal(one.cpu().flatten(), other.cpu().flatten())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def on_host(optimizer: optim.Optimizer) -> list[bool]:
    """Of each tensor of state that has dimensions, in the order of the parameters."""
    blocks = {block.untyped_storage()._cdata for block in host_blocks(optimizer)}
    return [
        tensor.untyped_storage()._cdata in blocks
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    ]


@pytest.mark.slow(sample=5)
@pytest.mark.parametrize(("make", "options"), CASES)
@pytest.mark.parametrize("n_parameters", [(8,), (1, 3, 4), (1,) * 8])
def test_the_same_bits(
    make: type[optim.Optimizer], options: dict[str, Any], n_parameters: tuple[int, ...]
) -> None:
    """From the first step, which makes the state, and beginning with a state that is there."""
    plain_net, plain = made(make, copy.deepcopy(options))
    train(plain_net, plain, range(N_STEPS))
    for first in (0, 2):
        net, optimizer = made(make, copy.deepcopy(options))
        train(net, optimizer, range(first))
        keep_on_host(optimizer, n_parameters)
        train(net, optimizer, range(first, N_STEPS))
        assert same(plain_net.state_dict(), net.state_dict())
        assert same(plain.state_dict(), optimizer.state_dict())
        assert on_host(optimizer)
        assert all(on_host(optimizer))


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(("make", "options"), CASES)
def test_a_step_takes_what_is_planned(
    make: type[optim.Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the profiler, with matrices of several sizes in buckets of several each."""
    monkeypatch.setattr(state_buckets, "LEAST_BUCKET_BYTES", 1)
    net = nn.Sequential(*(nn.Linear(64 * (1 + n % 3), 300) for n in range(12)))
    optimizer = make(net.parameters(), **copy.deepcopy(options))
    figures = optimizer_costs(optimizer, net, device=CPU, costs=default_costs(CPU))
    buckets = [StateBucket(*each) for each in figures["buckets"]]
    assert len(buckets) > 1
    keep_on_host(optimizer, [bucket.n_parameters for bucket in buckets])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    planned_bytes = streamed_workspace_bytes(buckets)
    host_bytes = sum(bucket.state_bytes for bucket in buckets)
    first_bytes = peak_above_bytes(lambda: optimizer.step(), CPU)
    there_bytes = sum(block.nbytes for block in host_blocks(optimizer))
    assert there_bytes == host_bytes
    # the host's memory is made in this step, and counted by the profiler
    assert first_bytes <= planned_bytes + host_bytes + figures["kept_state_bytes"] + SCALARS_BYTES
    later_bytes = peak_above_bytes(lambda: optimizer.step(), CPU)
    assert 0.6 * planned_bytes <= later_bytes <= planned_bytes + SCALARS_BYTES
    assert figures["state_bytes"] == sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )


def test_all_kinds_are_tried() -> None:
    assert {make for make, _ in CASES} == set(state_buckets.BY_PARAMETER)


def test_it_goes_on_after_it_is_brought_back() -> None:
    plain_net, plain = made(optim.AdamW, {})
    train(plain_net, plain, range(N_STEPS))
    net, optimizer = made(optim.AdamW, {})
    keep_on_host(optimizer, (3, 5))
    train(net, optimizer, range(2))
    bring_back(optimizer)
    assert not any(on_host(optimizer))
    assert "step" not in optimizer.__dict__
    train(net, optimizer, range(2, N_STEPS))
    assert same(plain_net.state_dict(), net.state_dict())
    assert same(plain.state_dict(), optimizer.state_dict())
    bring_back(optimizer)  # nothing more to do


def test_checkpoints_are_the_same_either_way() -> None:
    """Saved with the state on the host and loaded without, and the reverse."""
    plain_net, plain = made(optim.Adam, {})
    train(plain_net, plain, range(N_STEPS))
    for saves, loads in itertools.product((False, True), repeat=2):
        net, optimizer = made(optim.Adam, {})
        if saves:
            keep_on_host(optimizer, (2, 6))
        train(net, optimizer, range(2))
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        kept = torch.load(file)
        net, optimizer = made(optim.Adam, {})
        if loads:
            keep_on_host(optimizer, (4, 4))
            train(net, optimizer, range(1))  # what is loaded takes the place of this
        net.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        assert on_host(optimizer)
        assert all(on_host(optimizer)) == loads
        train(net, optimizer, range(2, N_STEPS))
        assert same(plain_net.state_dict(), net.state_dict())
        assert same(plain.state_dict(), optimizer.state_dict())


def test_hooks_closures_and_schedulers_see_one_step() -> None:
    for scheduler_first in (True, False):
        net, optimizer = made(optim.AdamW, {})
        steps = partial(optim.lr_scheduler.StepLR, optimizer, 1, gamma=0.5)
        scheduler = steps() if scheduler_first else None
        keep_on_host(optimizer, (1,) * 8)
        scheduler = scheduler or steps()
        assert seen_in_one_step(net, optimizer, scheduler) == [3, "closed", "stepped"]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def seen_in_one_step(net: nn.Module, optimizer: optim.Optimizer, scheduler: Any) -> list[Any]:
    """What hooks and the closure see."""
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(4, 3, 8, 8)).sum()
        loss.backward()
        seen.append("closed")
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(optimizer.step(closure), torch.Tensor)
        scheduler.step()
    return seen


def test_parameters_without_gradients_are_left_alone() -> None:
    results = []
    for keep in (False, True):
        net, optimizer = made(optim.SGD, {"momentum": 0.9})
        if keep:
            keep_on_host(optimizer, (2,) * 4)
        for index in range(N_STEPS):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad = torch.ones_like(parameter) if (index + number) % 3 else None
            optimizer.step()
        results.append(copy.deepcopy((net.state_dict(), optimizer.state_dict())))
    assert same(*results)


def test_sparse_state_stays_on_the_device() -> None:
    weights = []
    for is_on_host in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        if is_on_host:
            keep_on_host(optimizer, [1])
        for _ in range(3):
            table(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(table.weight)
    assert torch.equal(*weights)


def test_groups_that_come_later_keep_their_state_on_the_device() -> None:
    results = []
    for keep in (False, True):
        net, late = model(), nn.Parameter(torch.ones(5))
        optimizer = optim.Adam(net.parameters())
        if keep:
            keep_on_host(optimizer, (8,))
        train(net, optimizer, range(1))
        optimizer.add_param_group({"params": [late], "lr": 0.1})
        train(net, optimizer, range(1, 2))
        for parameter in (*net.parameters(), late):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        results.append(copy.deepcopy((net.state_dict(), late, optimizer.state_dict())))
        assert on_host(optimizer) == [keep] * 16 + [False] * 2
    assert same(*results)


def test_an_error_leaves_every_parameter_with_its_state() -> None:
    net, optimizer = made(optim.Adam, {})
    keep_on_host(optimizer, (1,) * 8)
    train(net, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    odd = optimizer.param_groups[0]["params"][2]
    del optimizer.state[odd]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()
    assert all(on_host(optimizer))
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]
    after = optimizer.state_dict()["state"]
    assert same(before["state"][7], after[7])  # its turn had not come


def test_a_state_that_is_made_anew_counts() -> None:
    """Someone starts the optimizer afresh, or replaces a tensor: that is what is stepped."""
    results = []
    for keep in (False, True):
        net, optimizer = made(optim.Adam, {})
        if keep:
            keep_on_host(optimizer, (3, 5))
        train(net, optimizer, range(2))
        first, second, *_ = optimizer.param_groups[0]["params"]
        optimizer.state[first] = {}
        optimizer.state[second]["exp_avg"] = torch.full_like(second, 0.5)
        optimizer.state[second]["exp_avg_sq"].mul_(2.0)
        train(net, optimizer, range(2, 3))
        assert on_host(optimizer) == [keep] * 16
        optimizer.state.clear()
        train(net, optimizer, range(3, 4))
        assert on_host(optimizer) == [keep] * 16
        results.append(copy.deepcopy((net.state_dict(), optimizer.state_dict())))
    assert same(*results)


def test_what_cannot_be_on_the_host() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"host, and LBFGS is not one of torch's optimizers"):
        keep_on_host(optim.LBFGS(net.parameters()), (8,))
    with pytest.raises(ValueError, match=r"trains 3 tensors, and this Adam trains 8; plan again"):
        keep_on_host(optim.Adam(net.parameters()), (1, 2))

    class Own(optim.Adam):
        pass

    with pytest.raises(ValueError, match="Own is not one of torch's"):
        keep_on_host(Own(net.parameters()), (8,))
    different = optim.Adam(net.parameters(), differentiable=True)
    with pytest.raises(ValueError, match="Adam was made with differentiable=True"):
        keep_on_host(different, (8,))


def test_an_optimizer_is_collected() -> None:
    net, optimizer = made(optim.Adam, {})
    keep_on_host(optimizer, (8,))
    train(net, optimizer, range(1))
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None


def test_a_step_takes_three_buckets_of_the_device() -> None:
    """16 matrices of 1 MB, with 2 MB of state each; without a bucket, all 32 MB are there."""
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    optimizer = optim.AdamW(net.parameters())
    keep_on_host(optimizer, (1,) * 16)

    def step() -> None:
        optimizer.step()

    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    each, host_bytes = 2 * 2**20, 32 * 2**20
    first = peak_above_bytes(step, CPU)  # makes the state, and the host's memory
    assert first <= host_bytes + 3 * each + 2 * 2**20 + 1024
    found = peak_above_bytes(step, CPU)
    assert 2 * each <= found <= 3 * each + 2 * 2**20 + 1024
    assert sum(block.nbytes for block in host_blocks(optimizer)) == host_bytes
    there = bytes_of(resident_tensors(net, (), [optimizer]), CPU)
    scalars = 16 * 4
    assert there == 2 * 16 * 2**20 + scalars
