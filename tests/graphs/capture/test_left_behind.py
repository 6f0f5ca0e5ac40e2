"""Tensors that forward leaves in attributes are outputs of the planned step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkpoint_solver import TraceError, apply, fit, plans_of, solve
from graphs.costs import cpu_peak_bytes
from graphs.trace import trace
from scheduler_runtime.export import module_tree
from tests.support.bitwise import assert_equal


class Pyramid(nn.Module):
    """Sets its attributes before it reads them (RAFT of torchvision, attention maps)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.maps = [torch.tensor(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.maps = [self.wide(x).relu()]
        for _ in range(3):
            self.maps.append(self.maps[-1].tanh())
        self.last = self.maps[-1].detach()
        return self.narrow(sum(self.maps)).square().mean()


class Buffer(nn.Module):
    """Replaces a buffer, and reads the shape of the old one (snntorch)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mem = torch.zeros_like(self.mem)
        if self.mem.shape != (len(x), 64):
            self.mem = torch.zeros(len(x), 64)
        for _ in range(4):
            self.mem = 0.9 * self.mem + self.wide(x).tanh()
        return self.narrow(self.mem).square().mean()


class Memories(nn.Module):
    """Keeps its state in a dict and an attribute, which the loop resets (spikingjelly)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.memories: dict[str, Any] = {"v": 0.0}
        self.trace = None

    def reset(self) -> None:
        self.memories["v"], self.trace = 0.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.memories["v"], float):
            self.memories["v"] = torch.zeros(len(x), 64)
        if self.trace is None:
            self.trace = x.mean(1, keepdim=True)
        for _ in range(4):
            self.memories["v"] = 0.9 * self.memories["v"] + self.wide(x).tanh()
            self.trace = self.trace * 0.5
        return self.narrow(self.memories["v"]).square().mean() + self.trace.mean()


def batch() -> torch.Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


def left_in(model: nn.Module) -> list[torch.Tensor]:
    values = [vars(model).get(name) for name in ("maps", "last", "memories", "trace")]
    return [t for t in pytree.tree_leaves([values, *model.buffers()]) if torch.is_tensor(t)]


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    getattr(model, "reset", lambda: None)()
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model: nn.Module, prepare: Callable[[nn.Module, Any], object]) -> list[torch.Tensor]:
    optimizer, x, found = torch.optim.SGD(model.parameters(), lr=0.1), batch(), []
    prepare(model, optimizer)
    for _ in range(3):
        found.append(step(model, optimizer, x))
        for left in left_in(model):
            found += [left.detach().clone(), torch.tensor(left.requires_grad)]
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "budget", "n_plans"),
    [(Pyramid, "231kB", 1), (Buffer, "220kB", 2), (Memories, "200kB", 1)],
)
def test_attributes_are_left_as_without_a_plan(kind: Any, budget: str, n_plans: int) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    expected = train(plain, lambda _model, _optimizer: None)
    assert_equal(expected, train(model, lambda m, o: fit(m, budget=budget, optimizer=o)))
    assert len(plans_of(model)) == n_plans  # the buffer has another shape in the first call


@pytest.mark.parametrize("kind", [Pyramid, Memories])
def test_what_the_last_step_left_is_freed_and_what_this_one_leaves_is_counted(kind: Any) -> None:
    model, x = kind(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, budget="1MB", optimizer=optimizer)
    for _ in range(2):
        step(model, optimizer, x)
    optimizer.zero_grad()
    # What is freed in the profile must be allocated in it.
    if kind is Pyramid:
        model.maps = model.last = None
    else:
        model.reset()
    gc.collect()

    def run() -> None:
        for _ in range(3):
            step(model, optimizer, x)

    taken = cpu_peak_bytes(run)
    resident_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
    predicted_bytes = plans_of(model)[-1].solution.simulation.peak_bytes
    assert resident_bytes + taken.peak_bytes == predicted_bytes


def test_a_plan_made_beforehand() -> None:
    plain, x = Pyramid(), batch()
    model = copy.deepcopy(plain)
    expected = train(plain, lambda _model, _optimizer: None)
    assert_equal(
        expected,
        train(model, lambda m, o: apply(m, solve(m, x, budget="1MB", optimizer=o))),
    )
    assert model.maps[-1].grad_fn is not None


def test_a_module_that_leaves_tensors_is_not_checkpointed() -> None:
    """A recomputation would begin with what the first run has left."""

    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept.tanh()

    model = nn.Sequential(nn.Linear(16, 16), Keeping(16, 16), nn.Sequential(nn.Linear(16, 1)))
    graph = trace(model, batch(), loss=lambda output, _: output.mean())
    assert module_tree(model, graph).blocks == ("0", "2")


class Returned(nn.Module):
    """What it leaves is what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.features = self.layer(x).tanh()
        return self.features.square().mean(), self.features


def test_a_tensor_that_is_also_returned_is_the_same_object() -> None:
    model, x = Returned(), batch()
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    _, features = model(x)
    assert model.features is features


def test_a_gradient_that_would_pass_through_what_is_left_is_refused() -> None:
    """It is attached to the graph of the step, so that no gradient is dropped silently."""
    model = Pyramid()
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    loss = model(batch())
    with pytest.raises(RuntimeError, match="a gradient that the plan does not expect"):
        (loss + model.maps[1].mean()).backward()


def test_a_state_that_is_not_reset_is_refused() -> None:
    model = Memories()
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    model(batch())
    with pytest.raises(TraceError, match="reset it before each step"):
        model(batch())
    model.reset()
    model(batch()).backward()


def test_a_buffer_with_a_graph_that_is_read_is_refused() -> None:
    class Reads(Buffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mem = 0.5 * self.mem.sum() + self.wide(x).tanh()
            return self.narrow(self.mem).square().mean()

    model = Reads()
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    for _ in range(3):
        model(batch()).backward()
        model.mem.detach_()  # truncated: without it, the next backward pass fails without a plan
    model(batch()).backward()
    with pytest.raises(TraceError, match="an earlier call has left in the attribute 'mem'"):
        model(batch())


class Either(nn.Module):
    """Leaves its state in some calls, and reads it in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, *, keeps: bool) -> torch.Tensor:
        hidden = self.wide(x).tanh()
        if keeps:
            self.state = hidden
        else:
            hidden = hidden * self.state.detach()
        return self.narrow(hidden).square().mean()


def test_a_call_of_another_kind_reads_what_the_last_call_has_left() -> None:
    plain, x = Either(), batch()
    model = copy.deepcopy(plain)
    fit(model, budget="1MB", optimizer=None)
    for count in range(4):
        for each in (plain, model):
            each.zero_grad()
            each(x * (count + 1), keeps=count % 2 == 0).backward()
        assert_equal((p.grad for p in plain.parameters()), (p.grad for p in model.parameters()))


def test_a_tensor_that_is_to_keep_its_gradient_is_refused() -> None:
    class Explained(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            self.kept.retain_grad()
            return self.kept.square().mean()

    model = Explained(16, 16)
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(TraceError, match="changes the attribute 'kept'"):
        model(batch())
