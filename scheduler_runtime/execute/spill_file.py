"""A file on the disk that holds copies of storages during a step.

The file has no name in its directory (`tempfile.TemporaryFile`: O_TMPFILE, or unlinked as soon as
it is made). So the system deletes it when the process ends, however it ends, and processes cannot
interfere with each other. All bytes are reserved before the step, so that a full disk is an error
then and not in the middle of the step. Reads and writes run in one thread for each direction,
beside the step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from scheduler_runtime.execute.copy_streams import CopyEvent
from solver.sizes_deadlines_progress import format_both


class CopyError(RuntimeError):
    """There is no room for copies of tensors, and nothing was run (see also `DiskError`)."""


class DiskError(CopyError):
    """A tensor could not be written to the disk or read back during a step, which therefore failed.

    The message says in which state gradients, buffers and random numbers are.
    """


class Job:
    """A read or write of the file that runs in a thread; implements `copy_streams.CopyEvent`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def hold_compute(self) -> None:
        self.hold_host()  # the host launches the device's work, so later work waits too

    def hold_host(self) -> None:
        self._future.result()

    def succeeded(self) -> bool:
        return self._future.exception() is None


class SpillFile:
    """A file of `size_bytes`. Raises CopyError if the directory has no room for it."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        what = f"{format_both(size_bytes)} for copies of tensors in {str(directory)!r}"
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, max(1, size_bytes))
        except OSError as error:
            raise CopyError(
                f"the step needs {what}, and the disk refuses them: {error.strerror}; nothing was "
                "run. Name another directory, make room, or plan with a smaller disk"
            ) from error
        self._writer = ThreadPoolExecutor(1, "spill")
        self._reader = ThreadPoolExecutor(1, "load")
        self._directory = directory

    def write(self, source: torch.Tensor, at: int, after: Iterable[CopyEvent]) -> CopyEvent:
        """Start to write `source` at this offset, once the jobs in `after` have ended.

        source: bytes in host memory, which must not change until the write has ended.
        """
        return Job(self._writer.submit(self._transfer, os.pwrite, source, at, tuple(after)))

    def read(self, target: torch.Tensor, at: int, after: Iterable[CopyEvent]) -> CopyEvent:
        """Start to read from this offset into host memory, once the jobs in `after` have ended."""
        return Job(self._reader.submit(self._transfer, os.preadv, target, at, tuple(after)))

    def _transfer(
        self,
        call: Callable[..., int],
        memory: torch.Tensor,
        at: int,
        after: tuple[CopyEvent, ...],
    ) -> None:
        for done in after:
            done.hold_host()
        # one call of the system may transfer only a part
        remaining: Any = memoryview(memory.numpy())  # type: ignore[arg-type]
        while remaining:
            try:
                n_bytes = call(
                    self._file.fileno(), remaining if call is os.pwrite else [remaining], at
                )
            except OSError as error:
                raise self._disk_error(call, str(error.strerror)) from error
            if n_bytes == 0:
                raise self._disk_error(call, "the file is shorter than it was")
            remaining, at = remaining[n_bytes:], at + n_bytes

    def _disk_error(self, call: Callable[..., int], reason: str) -> DiskError:
        what = "written to" if call is os.pwrite else "read from"
        return DiskError(
            f"a copy of a tensor could not be {what} the disk in {str(self._directory)!r}: {reason}"
        )
