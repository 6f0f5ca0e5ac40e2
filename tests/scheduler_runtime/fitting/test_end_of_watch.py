"""When the watch of a loss outside ends, and what it does to other modes and threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from scheduler_runtime import measure
from tests.scheduler_runtime.fitting.test_losses_of_the_caller import N_ROWS, WIDTH, fitted_loop


def test_the_watch_ends_at_the_optimizers_step() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    output = loop.model(loop.batch[0])
    assert len(_get_current_dispatch_mode_stack()) == 1
    F.mse_loss(output, loop.batch[1]).backward()
    loop.optimizer.step()
    assert not _get_current_dispatch_mode_stack()


def test_an_output_that_is_dropped_is_watched_no_longer() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    output = loop.model(loop.batch[0])
    assert len(_get_current_dispatch_mode_stack()) == 1
    del output
    assert not _get_current_dispatch_mode_stack()


def test_a_loss_that_is_dropped_is_watched_no_longer_without_the_optimizers_step() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    loss = F.mse_loss(loop.model(loop.batch[0]), loop.batch[1])
    loss.backward()
    assert len(_get_current_dispatch_mode_stack()) == 1
    del loss
    assert not _get_current_dispatch_mode_stack()


def test_a_loss_may_be_of_the_next_forward_pass_too() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    output = loop.model(loop.batch[0])
    (watch,) = _get_current_dispatch_mode_stack()
    with torch.no_grad():
        loop.model(loop.batch[0])
    assert _get_current_dispatch_mode_stack() == [watch]
    outputs = [output, loop.model(loop.batch[0])]
    del output
    assert _get_current_dispatch_mode_stack() == [watch]
    del outputs[0]
    assert _get_current_dispatch_mode_stack() == [watch]
    del outputs[0]
    assert not _get_current_dispatch_mode_stack()


def test_an_output_that_is_dropped_below_another_mode_is_watched_until_the_next() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    output = loop.model(loop.batch[0])
    with FlopCounterMode(display=False) as counter:
        del output
        loop.model(loop.batch[0])
    assert counter.get_total_flops() > 0
    loop.model(loop.batch[0])
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.slow
def test_the_stack_of_another_thread_is_left_alone() -> None:
    """The output dies in a thread with a watch of its own."""
    here, there = (fitted_loop(F.mse_loss, "10MB") for _ in range(2))
    outputs = [here.model(here.batch[0])]
    (watch,) = _get_current_dispatch_mode_stack()
    seen = []

    def other_thread() -> None:
        output = there.model(there.batch[0])
        outputs.clear()
        seen.append(_get_current_dispatch_mode_stack())
        del output
        seen.append(_get_current_dispatch_mode_stack())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert [len(stack) for stack in seen] == [1, 0]
    assert _get_current_dispatch_mode_stack() == [watch] != seen[0]
    here.model(here.batch[0])
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.slow
def test_a_model_that_is_not_called_again_leaves_the_next_one_to_be_watched() -> None:
    outputs: list[torch.Tensor] = []
    for _ in range(2):
        loop = fitted_loop(F.mse_loss, "10MB")
        outputs.append(loop.model(loop.batch[0]))
    assert len(_get_current_dispatch_mode_stack()) == 2
    outputs.pop(0)
    assert len(_get_current_dispatch_mode_stack()) == 2  # the other one is on top
    outputs.pop(0)
    assert not _get_current_dispatch_mode_stack()


def test_measuring_another_model_sees_nothing_of_a_watch() -> None:
    """A watch holds what an operator reads until it has looked at it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    batch, loss = torch.randn(N_ROWS, WIDTH), lambda output, _: _held_by_a_mode(output)
    alone = measure(model, batch, loss=loss, n_steps=1).peak_bytes
    loop = fitted_loop(F.mse_loss, "10MB")
    output = loop.model(loop.batch[0])
    assert measure(model, batch, loss=loss, n_steps=1).peak_bytes == alone
    F.mse_loss(output, loop.batch[1]).backward()
    loop.optimizer.step()
    assert not _get_current_dispatch_mode_stack()


def test_inside_of_another_mode_nothing_is_watched() -> None:
    loop = fitted_loop(F.mse_loss, "10MB")
    with FlopCounterMode(display=False):
        output = loop.model(loop.batch[0])
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert not _get_current_dispatch_mode_stack()
    F.mse_loss(output, loop.batch[1]).backward()


def _held_by_a_mode(x: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, torch.arange(N_ROWS - 1, -1, -1)).mean()
