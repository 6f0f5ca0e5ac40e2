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
"""Most seconds that a `late` call waits."""


class FailingDisk:
    """Replaces a function of `os` by one that fails from some call on.

    call: name of the function.
    fails_at: index of the first call that fails; all later ones fail, too (None: none fails).
    short: failing calls copy nothing and return 0, instead of raising OSError.
    late: the first call that fails waits for this event before it fails, at most N_S seconds.

    Attribute n: number of calls so far.
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
        index, self.n = self.n, self.n + 1  # reads and writes each have one thread, so no lock
        if self._fails_at is None or index < self._fails_at:
            return self._plain(*arguments)
        if self._late is not None and index == self._fails_at:
            self._late.wait(N_S)
        if self._short:
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def failing_disk(call: str, fails_at: int | None = None, **options: Any) -> Iterator[FailingDisk]:
    """A context in which the function `call` of `os` is replaced by a FailingDisk."""
    disk = FailingDisk(call, fails_at, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, call, disk)
        yield disk
