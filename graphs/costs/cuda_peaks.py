"""Peak memory of parts of a run on a CUDA device."""

from __future__ import annotations

import torch


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
