"""What runs and for how long, in a few plain lines of a log file.

A thread writes them, because what takes long may tell nothing meanwhile: one search, one pass
through a model, one linear program of HiGHS.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from solver.sizes_deadlines_progress.deadline import now_s

Say = Callable[[str], None]

FIRST_AFTER_S = 2.0
"""What runs is written after this time, then after twice as long, and so on: ten lines in half an
hour."""


LAST_LINE_S = 1.0
"""The thread has at most so long to end, which takes it no time unless the machine is busy."""


class Lines:
    """The lines of one stage. write: takes one; by `tick` it is called in whatever thread ticks."""

    def __init__(self, what: str, write: Say) -> None:
        self.what = what
        self._write = write
        self._started_s = now_s()
        self._due_s = FIRST_AFTER_S
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def due_in_s(self) -> float:
        """Until the next line, at least 0."""
        return max(0.0, self._started_s + self._due_s - now_s())

    def tick(self) -> None:
        """Write what runs, if a line is due."""
        with self._lock:
            passed_s = now_s() - self._started_s
            if not self._is_open or passed_s < self._due_s:
                return
            while self._due_s <= passed_s:
                self._due_s *= 2
            self._write(f"{self.what.rstrip('.')} ({passed_s:.0f} s)...")

    def close(self) -> None:
        """No line comes after this."""
        with self._lock:
            self._is_open = False


@contextlib.contextmanager
def now_and_then(what: str, write: Say) -> Iterator[Say]:
    """Write `what` while the block runs and takes long; the yielded function replaces `what`."""
    lines = Lines(what, write)
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(lines.due_in_s):
            lines.tick()

    def say(line: str) -> None:
        lines.what = line

    thread = threading.Thread(target=run, name="what-runs", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        lines.close()
        thread.join(LAST_LINE_S)  # the caller finds its threads as they were
