"""Peak memory from profiler events against known byte counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphs.costs.memory_events import MemoryUse, cpu_peak_bytes

N = 256
SQUARE = 4 * N * N
"""Bytes of a square matrix."""


def test_a_chain_of_products_holds_two_of_them_at_once() -> None:
    x = torch.randn(N, N)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y @ x
        return y

    assert cpu_peak_bytes(chain) == MemoryUse(peak_bytes=2 * SQUARE, end_bytes=0)


def test_what_is_kept_is_there_at_the_end() -> None:
    kept = []
    used = cpu_peak_bytes(lambda: kept.append(torch.empty(N, N)))
    assert used == MemoryUse(peak_bytes=SQUARE, end_bytes=SQUARE)


def test_the_order_of_release_and_allocation_counts() -> None:
    def release_first() -> None:
        a = torch.empty(N, N)
        del a
        torch.empty(N, N)

    def allocate_first() -> None:
        a = torch.empty(N, N)
        b = torch.empty(N, N)
        del a, b

    assert cpu_peak_bytes(release_first).peak_bytes == SQUARE
    assert cpu_peak_bytes(allocate_first).peak_bytes == 2 * SQUARE


def test_what_was_there_before_does_not_count() -> None:
    before = torch.empty(N, N)
    assert cpu_peak_bytes(lambda: before + 1).peak_bytes - SQUARE <= 64  # the 1 is a tensor too


def test_views_and_work_in_place_take_nothing() -> None:
    x = torch.randn(N, N)
    assert cpu_peak_bytes(lambda: x.t()[::2].neg_()) == MemoryUse(0, 0)


def test_a_backward_pass_is_seen() -> None:
    """Saved activations until the backward pass has used them, gradients to the end."""
    layers = nn.Sequential(*(nn.Linear(N, N, bias=False) for _ in range(4)))
    x = torch.randn(N, N)

    def step() -> None:
        layers(x).sum().backward()

    used = cpu_peak_bytes(step)
    assert used.end_bytes == 4 * SQUARE  # a gradient for each weight
    # Each layer's backward drops a saved input and makes a gradient of a weight, so the most is as
    # often there: those four, and of the activations' gradients the old one and the new one.
    assert 5 * SQUARE <= used.peak_bytes <= 6 * SQUARE + 100


def test_an_error_passes_through_and_leaves_no_profiler_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        cpu_peak_bytes(lambda: 1 / 0)
    assert cpu_peak_bytes(lambda: torch.empty(N, N)).peak_bytes == SQUARE


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_the_callers_own_profiler_goes_on(profile: Any) -> None:
    def step() -> None:
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        torch.empty(N, N)

    with profile() as profiler, torch.no_grad(), torch.autocast("cpu"):
        torch.ones(1).sin()
        assert cpu_peak_bytes(step).peak_bytes == SQUARE
        assert cpu_peak_bytes(lambda: cpu_peak_bytes(step)).peak_bytes == 0
        with pytest.raises(ZeroDivisionError):
            cpu_peak_bytes(lambda: 1 / 0)
        torch.ones(1).cos()
    assert {"aten::sin", "aten::cos"} <= {event.key for event in profiler.key_averages()}


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    cpu_peak_bytes(lambda: torch.empty(N, N))
    assert capfd.readouterr() == ("", "")


def test_it_agrees_with_torch_profiler() -> None:
    """The public profiler's events, added up in the order of their time stamps."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    taken = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    assert cpu_peak_bytes(step) == MemoryUse(peak_bytes=peak, end_bytes=taken)
