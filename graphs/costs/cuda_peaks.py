"""Peak memory of parts of a run on a CUDA device."""

from __future__ import annotations

import torch


class CudaPeaks:
    """By the allocator: the most that each part of a run takes above that part's start.

    `begin` opens a part and ends the one before; of several of one name the largest counts. Nothing
    waits for the device: the allocator counts when the host hands work over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}
        self._part: str | None = None
        self._start_bytes = 0

    def begin(self, part: str) -> None:
        if part == self._part:
            return
        self.ended()
        self._part = part
        self._start_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def ended(self) -> dict[str, int]:
        if self._part is not None:
            peak = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
            self._peaks[self._part] = max(peak, self._peaks.get(self._part, 0))
            self._part = None
        return self._peaks
