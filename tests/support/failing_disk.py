"""A disk that fails at chosen reads and writes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

N_S = 0.05
"""For which a late call waits, where nothing ends its waiting."""


class FailingDisk:
    """call: of `os`, by name. fails_at: index of the call that fails, as all later ones do (None:
    none does). short: it copies nothing, and does not raise. late: the first that fails waits a
    while for this.

    n: calls so far.
    """

    def __init__(
        self,
        call: str,
        fails_at: int | None,
        *,
        short: bool = False,
        late: threading.Event | None = None,
    ) -> None:
        self._fails_at, self._short, self._late = fails_at, short, late
        self.n = 0
        self._plain = getattr(os, call)

    def __call__(self, *arguments: Any) -> int:
        index, self.n = self.n, self.n + 1  # a thread for each direction
        if self._fails_at is None or index < self._fails_at:
            done: int = self._plain(*arguments)
            return done
        if self._late is not None and index == self._fails_at:
            self._late.wait(N_S)
        if self._short:
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def failing_disk(call: str, fails_at: int | None = None, **options: Any) -> Iterator[FailingDisk]:
    """Inside, the disk fails there."""
    disk = FailingDisk(call, fails_at, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, call, disk)
        yield disk
