"""Progress as a few plain lines in a log file: what is running, and for how long.

A separate thread writes them, because a long computation (a search, a pass through a model, a
linear program in HiGHS) may report nothing while it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from solver.sizes_deadlines_progress.deadline import now_s

Say = Callable[[str], None]

FIRST_AFTER_S = 2.0
"""When the first line is written; each later one comes after twice the time of the one before: ten
lines in half an hour."""


LAST_LINE_S = 1.0
"""How long to wait at most for the thread to end. On an idle machine it ends at once."""


class Lines:
    """The progress lines of one stage.

    what: what is running; may be replaced meanwhile.
    write: takes one line; called in the thread that calls `tick`.
    """

    def __init__(self, what: str, write: Say) -> None:
        self.what = what
        self._write = write
        self._started_s = now_s()
        self._due_s = FIRST_AFTER_S
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def due_in_s(self) -> float:
        """Seconds until the next line, at least 0."""
        return max(0.0, self._started_s + self._due_s - now_s())

    def tick(self) -> None:
        """Write a line if one is due."""
        with self._lock:
            passed_s = now_s() - self._started_s
            if not self._is_open or passed_s < self._due_s:
                return
            while self._due_s <= passed_s:
                self._due_s *= 2
            self._write(f"{self.what.rstrip('.')} ({passed_s:.0f} s)...")

    def close(self) -> None:
        """Write no more lines."""
        with self._lock:
            self._is_open = False


@contextlib.contextmanager
def log_progress(what: str, write: Say) -> Iterator[Say]:
    """Write `what` with the time passed, now and then, while the block runs.

    Nothing is written in the first FIRST_AFTER_S. The yielded function replaces `what`.
    """
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
        thread.join(LAST_LINE_S)  # leave no thread behind
