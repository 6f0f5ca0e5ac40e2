"""The watch of a loss outside, between other things that a training does."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from scheduler_runtime import fit, plan_ahead, plans_of, remove
from scheduler_runtime.fitting import loss_reserve
from tests.support.bitwise import assert_equal

N_ROWS, WIDTH = 128, 32
BUDGET_BYTES = 270_000
"""With room for what cross-entropy takes, and not for the reserve of a first step."""


def net() -> nn.Module:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5)]
    return nn.Sequential(*(m for pair in pairs for m in pair))


def batch(n: int = N_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))
    return x, x.argmax(1)


class Training:
    """plain: without a plan."""

    def __init__(self, *, plain: bool = False, **options: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if not plain:
            options = {"budget": BUDGET_BYTES, **options}
            fit(self.model, optimizer=self.optimizer, **options)

    def step(
        self, n: int = N_ROWS, between: Callable[[torch.Tensor], Any] = lambda _output: None
    ) -> None:
        """between: run with the output of the forward pass, before the loss."""
        x, target = batch(n)
        self.optimizer.zero_grad()
        output = self.model(x)
        between(output)
        loss = F.cross_entropy(output, target)
        del output
        loss.backward()
        self.optimizer.step()

    @property
    def reserves(self) -> list[str]:
        """What each plan reserves for the loss."""
        return [plan.notes[0].split("; ")[1] for plan in plans_of(self.model)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


@pytest.fixture(scope="module")
def reserve_seen() -> str:
    """Of a training in which nothing happens in between."""
    training = Training()
    training.step()
    first = training.reserves
    training.step()
    (seen,) = training.reserves
    assert [seen] != first
    return seen


def _evaluate(training: Training) -> None:
    with torch.no_grad():
        training.model(batch()[0])


def _step_of_another(_training: Training) -> None:
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    other(torch.ones(2)).sum().backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("happens", [_evaluate, _step_of_another])
def test_what_happens_before_the_loss_does_not_end_the_watch(
    happens: Callable[[Training], None],
) -> None:
    plain, training = Training(plain=True), Training()
    first: list[str] = []
    for _ in range(2):
        training.step(between=lambda _output: happens(training))
        plain.step(between=lambda _output: happens(plain))
        first = first or training.reserves
    assert len(training.reserves) == 1
    assert training.reserves != first
    assert_equal(plain.model.parameters(), training.model.parameters())


@pytest.mark.slow
def test_an_error_before_the_loss_leaves_the_plan_to_be_watched(reserve_seen: str) -> None:
    def fails(_output: torch.Tensor) -> None:
        raise ZeroDivisionError

    training = Training()
    with pytest.raises(ZeroDivisionError):
        training.step(between=fails)
    for _ in range(2):
        training.step()
    assert training.reserves == [reserve_seen]


@pytest.mark.slow
def test_a_forward_pass_that_is_dropped_leaves_the_plan_to_be_watched(reserve_seen: str) -> None:
    training = Training()
    training.model(batch()[0])
    for _ in range(2):
        training.step()
    assert training.reserves == [reserve_seen]


def test_a_plan_that_is_removed_is_not_watched() -> None:
    training = Training()
    output = training.model(batch()[0])
    remove(training.model)
    assert not _get_current_dispatch_mode_stack()
    output.sum().backward()


@pytest.mark.slow
def test_plans_of_several_shapes_are_each_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    training = Training()
    lengths = N_ROWS, N_ROWS - 16
    before = plan_ahead(training.model, [batch(n)[0] for n in lengths])
    for n in (*lengths, *lengths):
        training.step(n)
    after = plans_of(training.model)
    assert len(after) == 2
    assert not set(map(id, before)) & set(map(id, after))
    assert caplog.text.count("planned again, since the loss takes") == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_empty_batch_says_nothing_of_the_loss() -> None:
    training = Training()
    training.model(torch.randn(0, WIDTH)).sum().backward()
    training.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("is_planned_before", [False, True])
def test_planning_another_model_is_no_part_of_the_loss(
    is_planned_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second model is called, and so planned, while the first one's loss is watched."""
    seen: list[Any] = []
    arrived = loss_reserve.LossReserve.watch

    def watch(self: Any, *args: Any, on_seen: Any, **options: Any) -> None:
        def noted(what: Any, reached: Any) -> None:
            seen.append(what)
            on_seen(what, reached)

        arrived(self, *args, on_seen=noted, **options)

    monkeypatch.setattr(loss_reserve.LossReserve, "watch", watch)
    one, other = Training(budget="10MB"), Training(budget="10MB")
    x, target = batch()
    if is_planned_before:
        plan_ahead(other.model, [x.clone().requires_grad_()])
    F.cross_entropy(other.model(one.model(x)), target).backward()
    for each in (one, other):
        each.optimizer.step()
    parameters_bytes = sum(p.nbytes for p in other.model.parameters())
    assert seen[1].read_bytes <= parameters_bytes + target.nbytes + 1000


@pytest.mark.slow
def test_a_loss_computed_twice_or_retained_has_the_bits() -> None:
    plain, twice = Training(plain=True), Training()
    kept: list[torch.Tensor] = []
    for each in (plain, twice):
        each.step(between=lambda output: kept.append(F.cross_entropy(output, batch()[1])))
        kept.clear()
    assert_equal(plain.model.parameters(), twice.model.parameters())
    _, target = batch()
    for each in (plain, twice):
        each.optimizer.zero_grad()
        F.cross_entropy(each.model(batch()[0]), target).backward(retain_graph=True)
        each.optimizer.step()
    assert_equal(plain.model.parameters(), twice.model.parameters())


@pytest.mark.slow
def test_the_watch_and_copies_to_the_host_and_accumulation() -> None:
    plain = Training(plain=True)
    training = Training(host_budget="1MB", host_link="100GB/s")
    for each in (plain, training):
        for _ in range(2):
            each.optimizer.zero_grad()
            for n in (N_ROWS, N_ROWS - 16):
                x, target = batch(n)
                F.cross_entropy(each.model(x), target).backward()
            each.optimizer.step()
    assert_equal(plain.model.parameters(), training.model.parameters())
    for plan in plans_of(training.model):
        assert plan.solution.simulation.peak_bytes <= BUDGET_BYTES
        assert plan.solution.simulation.host_peak_bytes <= 10**6


MASK = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)) < 0.5
MODE_SENSITIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda x: x[:2].prod(),
    "prod of a dimension": lambda x: x.prod(-1),
    "masked_fill": lambda x: x.masked_fill(MASK, x.square().mean()),
    "masked_fill_": lambda x: (x * 1).masked_fill_(MASK, x.square().mean()),
    "max": lambda x: -x.max(),
    "median": lambda x: -x.median(),
    "complex pinv": lambda x: torch.view_as_real(
        torch.linalg.pinv(torch.view_as_complex(x[:10].reshape(-1, 2)).view(8, 5))
    ),
    "complex cumprod": lambda x: torch.view_as_real(
        torch.view_as_complex((x * MASK).reshape(-1, 2))[:143].view(13, 11).cumprod(1)
    ),
}


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("is_direct", [True, False], ids=["backward(gradient)", "loss"])
@pytest.mark.parametrize("name", MODE_SENSITIVE)
def test_functions_that_look_for_modes_have_the_bits_of_eager_mode(
    name: str, is_direct: bool
) -> None:
    """PyTorch's backward functions of these take another formula while any mode is there."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(40, 8)
    for each in (plain, model):
        made = each(batch)
        made.retain_grad()
        result = MODE_SENSITIVE[name](made)
        if is_direct:
            result.backward(torch.linspace(0.3, 1.7, result.numel()).view_as(result))
        else:
            result.square().mean().backward()
        each.made_gradient = made.grad
    remove(model)  # takes the watch off
    assert same_bytes(plain.made_gradient, model.made_gradient)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bytes(expected.grad, parameter.grad)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """-0 is not 0."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_operators_are_as_before_after_the_watch() -> None:
    model = nn.Linear(8, 8)
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(torch.randn(4, 8))
    assert looking_kernels_are_there()
    output.max().backward()
    remove(model)
    assert not looking_kernels_are_there()


@pytest.mark.slow
def test_threads_that_watch_in_turn_leave_pytorchs_flags_as_they_were() -> None:
    """The stack of modes is of a thread, its flags are of the process."""
    trainings = Training(), Training()
    began, ended = threading.Event(), threading.Event()

    def second() -> None:
        def between(_output: torch.Tensor) -> None:
            began.set()
            ended.wait()

        trainings[1].step(between=between)

    other = threading.Thread(target=second)

    def start(_output: torch.Tensor) -> None:
        other.start()
        began.wait()

    trainings[0].step(between=start)
    ended.set()
    other.join()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)


def test_a_forward_pass_within_a_backward_pass_is_not_watched() -> None:
    """A reentrant checkpoint around the model runs it there."""
    model = nn.Linear(8, 8)
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 8, requires_grad=True)
    checkpoint(model, batch, use_reentrant=True).sum().backward()
    assert len(plans_of(model)) == 1
    assert not looking_kernels_are_there()


def looking_kernels_are_there() -> bool:
    key = torch._C.DispatchKey.AutogradCPU
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::max", key)


def test_a_thread_that_ends_before_its_loss_leaves_no_kernels() -> None:
    training = Training()
    held: list[torch.Tensor] = []
    seen: list[bool] = []

    def forward() -> None:
        held.append(training.model(batch()[0]))
        seen.append(looking_kernels_are_there())

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert seen == [True]
    assert held[0].requires_grad
    assert not looking_kernels_are_there()


@pytest.mark.slow
def test_an_optimizer_within_the_backward_pass_leaves_no_kernels() -> None:
    """It ends the watch there, which the engine puts back after the backward pass."""
    training = Training()
    first = next(training.model.parameters())
    hook = first.register_post_accumulate_grad_hook(lambda _parameter: training.optimizer.step())
    for _ in range(3):
        F.cross_entropy(training.model(batch()[0]), batch()[1]).backward()
        training.optimizer.zero_grad()
    hook.remove()
    remove(training.model)
    assert not looking_kernels_are_there()
    fit(training.model, budget=BUDGET_BYTES, optimizer=training.optimizer)
    training.step()
    remove(training.model)
    assert not looking_kernels_are_there()
