"""Calls of C code that Ctrl-C can end.

Python runs the handler of a signal in the main thread between two of its instructions, so not
before a call of C code returns, and one linear program may take as long as the whole search may.
Such a call runs in another thread, and the main thread waits for it, which a signal does interrupt.
Nothing can stop the call itself: it runs on to its own time limit. The end of the process waits for
it a moment only.

That helps with C code that lets go of the interpreter, as HiGHS does in SciPy from 1.15 on and in
highspy.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from solver.sizes_deadlines_progress.deadline import OutOfTimeError, interrupted

POLL_S = 0.05
"""Between two looks at whether Ctrl-C was pressed."""
LEFT_S = 1.0
"""At the end of the process, for calls that nobody waits for. C++ code that comes back to an
interpreter that is being taken down aborts the process, so calls that end soon end before."""

_R = TypeVar("_R")


class _Worker:
    """Runs one call after another. One thread for all of them: HiGHS starts helpers for each
    thread that it is called in."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # a daemon: nobody waits for it when the process ends
        self.thread = threading.Thread(target=self._work, name="solver-calls", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (given := self.calls.get()) is not None:
            future, call = given
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
                future.set_exception(error)
            del given, future, call


_idle: _Worker | None = None
"""A worker without a call; of the main thread alone."""
_left: list[_Worker] = []
"""Workers whose call nobody waits for any more."""


def interruptible(call: Callable[[], _R]) -> _R:
    """What `call` returns or raises, with Ctrl-C as in Python code.

    Outside of the main thread, where no signal arrives, it is called directly.

    Raises KeyboardInterrupt; OutOfTimeError once Ctrl-C has ended the searches
    (`ctrl_c_ends_searches`).
    """
    global _idle
    if threading.current_thread() is not threading.main_thread():
        return call()
    worker, _idle = _idle, None
    if worker is None or not worker.thread.is_alive():  # threads do not survive a fork
        worker = _Worker()
    future: Future[_R] = Future()
    try:
        worker.calls.put((future, call))
        while not wait((future,), timeout=POLL_S).done:
            if interrupted():
                raise OutOfTimeError
    except BaseException:
        atexit.unregister(_wait_for_left)  # once is enough
        atexit.register(_wait_for_left)
        _left.append(worker)
        worker.calls.put(None)
        raise
    _idle = worker
    return future.result()


def end_idle_calls() -> None:
    """End the thread that waits for the next call; that call starts another. Of the main thread."""
    global _idle
    if _idle is not None and threading.current_thread() is threading.main_thread():
        worker, _idle = _idle, None
        worker.calls.put(None)
        worker.thread.join()


atexit.register(end_idle_calls)  # before the interpreter goes, in which no thread ends cleanly


def calls_are_left() -> bool:
    """Whether calls that nobody waits for are still running."""
    _left[:] = [worker for worker in _left if worker.thread.is_alive()]
    return bool(_left)


def _wait_for_left() -> None:
    until_s = time.monotonic() + LEFT_S
    for worker in _left:
        worker.thread.join(max(0.0, until_s - time.monotonic()))
