"""The measured link to the host: plausible, and the model of latency and rate."""

from __future__ import annotations

import pytest
import torch

from graphs.costs import host_copies
from graphs.costs.host_copies import LARGE_BYTES, SMALL_BYTES, measured_host_copies


def test_this_machine() -> None:
    found = measured_host_copies(torch.device("cpu"))
    assert 1e8 < found.out_bytes_per_s < 1e13
    assert 1e8 < found.in_bytes_per_s < 1e13
    assert 0 <= found.latency_s < 1e-2
    assert found.source == "measured on this machine (CPU)"


def test_two_sizes_tell_latency_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out at 4 GB/s, back at 2 GB/s, with 3 and 5 microseconds for each copy."""
    took = iter([3e-6 + SMALL_BYTES / 4e9, 3e-6 + LARGE_BYTES / 4e9])
    back = iter([5e-6 + SMALL_BYTES / 2e9, 5e-6 + LARGE_BYTES / 2e9])
    both = iter([took, back])
    monkeypatch.setattr(host_copies, "_seconds_of_copies", lambda *_: tuple(next(both)))
    found = measured_host_copies(torch.device("cpu"))
    assert found.out_bytes_per_s == pytest.approx(4e9)
    assert found.in_bytes_per_s == pytest.approx(2e9)
    assert found.latency_s == pytest.approx(5e-6)
