"""Copies between a device and its host's memory, measured on this machine.

A copy takes a latency plus its bytes over a rate; timing two sizes gives both. On CUDA the host's
memory is pinned, and copies are timed on the device, one direction at a time. On the CPU both
memories are the host's, and a copy is a memcpy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from graphs.hardware import HostCopies

SMALL_BYTES, LARGE_BYTES = 2**12, 2**26
N_RUNS, N_TOGETHER = 7, 50
"""Timed runs for each size, and how many consecutive small copies make one such run."""


def measured_host_copies(device: torch.device) -> HostCopies:
    """Measure rate and latency of copies between the device and the host, in both directions.

    Raises RuntimeError if there is no memory for two tensors of LARGE_BYTES.
    """
    host = torch.zeros(LARGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    out, back = (_measure_link(host, on_device, device), _measure_link(on_device, host, device))
    return HostCopies(
        out_bytes_per_s=out[0],
        in_bytes_per_s=back[0],
        latency_s=max(out[1], back[1]),
        source=f"measured on this machine ({name})",
    )


def _measure_link(
    target: torch.Tensor, source: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Rate in bytes per second, from the difference of the large and the small copy, and latency in
    seconds: what the small copy takes beyond that rate."""
    small_s, large_s = _seconds_of_copies(target, source, device)
    rate = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-12)
    return rate, max(0.0, small_s - SMALL_BYTES / rate)


def _seconds_of_copies(
    target: torch.Tensor, source: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Seconds of one copy of SMALL_BYTES and of one of LARGE_BYTES."""

    def small() -> None:
        target[:SMALL_BYTES].copy_(source[:SMALL_BYTES], non_blocking=True)

    def large() -> None:
        target.copy_(source, non_blocking=True)

    for warm_up, n_runs in ((small, N_TOGETHER), (large, 1)):
        seconds_of(warm_up, device, n_runs=n_runs)
    small_s = statistics.median(seconds_of(small, device, n_runs=N_TOGETHER) for _ in range(N_RUNS))
    return small_s, statistics.median(seconds_of(large, device) for _ in range(N_RUNS))


def seconds_of(run: Callable[[], object], device: torch.device, *, n_runs: int = 1) -> float:
    """Seconds per run, the mean of `n_runs` consecutive ones; on CUDA timed with events on the
    device."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        for _ in range(n_runs):
            run()
        return (time.perf_counter() - started_s) / n_runs
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        for _ in range(n_runs):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / n_runs
