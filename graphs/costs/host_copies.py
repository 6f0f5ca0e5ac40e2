"""Copies between a device and its host's memory, measured on this machine.

A copy takes a latency and its bytes over a rate: two sizes tell both. On CUDA the host's memory is
pinned, and the device's clock counts, one direction at a time. On the CPU both memories are the
host's, and a copy is a memcpy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from graphs.hardware import HostCopies

SMALL_BYTES, LARGE_BYTES = 2**12, 2**26
N_RUNS, N_TOGETHER = 7, 50
"""Timed runs of each size, and small copies in one of them."""


def measured_host_copies(device: torch.device) -> HostCopies:
    """Raises RuntimeError where there is no memory for two copies of LARGE_BYTES."""
    host = torch.zeros(LARGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    out, back = (_link(host, there, device), _link(there, host, device))
    return HostCopies(
        out_bytes_per_s=out[0],
        in_bytes_per_s=back[0],
        latency_s=max(out[1], back[1]),
        source=f"measured on this machine ({name})",
    )


def _link(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Bytes per second of what the large copy has more than the small one, and the rest."""
    small_s, large_s = _seconds(target, source, device)
    rate = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-12)
    return rate, max(0.0, small_s - SMALL_BYTES / rate)


def _seconds(
    target: torch.Tensor, source: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Of one copy of SMALL_BYTES and of one of LARGE_BYTES."""

    def small() -> None:
        for _ in range(N_TOGETHER):
            target[:SMALL_BYTES].copy_(source[:SMALL_BYTES], non_blocking=True)

    def large() -> None:
        target.copy_(source, non_blocking=True)

    timed = _on_cuda if device.type == "cuda" else _on_cpu
    for warm_up in (small, large):
        timed(warm_up, device)
    small_s = statistics.median(timed(small, device) for _ in range(N_RUNS)) / N_TOGETHER
    return small_s, statistics.median(timed(large, device) for _ in range(N_RUNS))


def _on_cpu(run: Callable[[], None], _device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _on_cuda(run: Callable[[], None], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
