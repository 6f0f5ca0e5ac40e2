"""Memory of a device: how much is free, and the peaks of parts of a run on CUDA."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> float:
    """How many bytes can still be allocated on the device; infinite if unknown.

    On CUDA: what the driver reports as free, plus what PyTorch's allocator has reserved but not
    allocated. On the CPU: what Linux reports as available; a process that exceeds it is killed.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(sizes["MemAvailable"].split()[0]) if "MemAvailable" in sizes else float("inf")


class CudaPeaks:
    """For each named part of a run: the most bytes allocated above what was allocated at its start.

    `begin` starts a part and ends the one before; if a name comes up several times, the largest
    peak counts. The numbers are the caching allocator's. It counts when the host launches work, so
    nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}
        self._part: str | None = None
        self._start_bytes = 0

    def begin(self, part: str) -> None:
        """Start the part of this name; no effect if it is running."""
        if part == self._part:
            return
        self.end()
        self._part = part
        self._start_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> dict[str, int]:
        """End the part that is running, if any; returns the peak bytes of each part so far."""
        if self._part is not None:
            peak = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
            self._peaks[self._part] = max(peak, self._peaks.get(self._part, 0))
            self._part = None
        return self._peaks
