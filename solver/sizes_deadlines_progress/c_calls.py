"""Calls of C code that Ctrl-C can end.

Python runs the handler of a signal in the main thread between two of its instructions, so not
before a call of C code returns, and one linear program may take as long as the whole search may.
Such a call runs in another thread, and the main thread waits for it, which a signal does interrupt.
Nothing can stop the call itself: it runs on to its own time limit. The end of the process waits for
it a moment only. Several such calls run at once, as far as there are processors.

That helps with C code that lets go of the interpreter, as HiGHS does in SciPy from 1.15 on and in
highspy.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
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
    """Runs one call after another, in one thread: HiGHS starts helpers for each that it is called
    in."""

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


_idle: list[_Worker] = []
"""Workers without a call; of the main thread alone."""
_left: list[_Worker] = []
"""Workers whose call nobody waits for any more."""


def interruptible(call: Callable[[], _R]) -> _R:
    """What `call` returns or raises, with Ctrl-C as in Python code; see `at_once`."""
    return at_once([call])[0]


def at_once(calls: Sequence[Callable[[], _R]]) -> list[_R]:
    """What each of the calls returns, with Ctrl-C as in Python code.

    Outside of the main thread, where no signal arrives, they are called directly, in turn.

    Raises what a call raises; KeyboardInterrupt; OutOfTimeError once Ctrl-C has ended the searches
    (`ctrl_c_ends_searches`).
    """
    if threading.current_thread() is not threading.main_thread():
        return [call() for call in calls]
    left, results = deque(enumerate(calls)), dict[int, _R]()
    run_left = partial(_run_those_left, left, results)
    workers = _taken(min(len(calls), _n_processors()))
    futures = [Future[None]() for _ in workers]
    try:
        for worker, future in zip(workers, futures, strict=True):
            worker.calls.put((future, run_left))
        while wait(futures, timeout=POLL_S).not_done:
            if interrupted():
                raise OutOfTimeError
    except BaseException:
        left.clear()
        atexit.unregister(_wait_for_left)  # once is enough
        atexit.register(_wait_for_left)
        _left.extend(workers)
        for worker in workers:
            worker.calls.put(None)
        raise
    _idle.extend(workers)
    for future in futures:
        future.result()
    return [results[index] for index in range(len(calls))]


def _run_those_left(left: deque[tuple[int, Callable[[], _R]]], results: dict[int, _R]) -> None:
    """Of calls with their numbers, in one of the threads that do so."""
    while True:
        try:
            index, call = left.popleft()
        except IndexError:
            return
        results[index] = call()


def _taken(n_workers: int) -> list[_Worker]:
    found = [_idle.pop() for _ in range(min(n_workers, len(_idle)))]
    alive = [worker for worker in found if worker.thread.is_alive()]  # not after a fork
    return alive + [_Worker() for _ in range(n_workers - len(alive))]


def _n_processors() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def end_idle_calls() -> None:
    """End the threads that wait for calls; the next call starts others. Of the main thread."""
    if threading.current_thread() is threading.main_thread():
        for worker in _idle:
            worker.calls.put(None)
        for worker in _idle:
            worker.thread.join()
        _idle.clear()


atexit.register(end_idle_calls)  # before the interpreter goes, in which no thread ends cleanly


def calls_are_left() -> bool:
    """Whether calls that nobody waits for are still running."""
    _left[:] = [worker for worker in _left if worker.thread.is_alive()]
    return bool(_left)


def _wait_for_left() -> None:
    until_s = time.monotonic() + LEFT_S
    for worker in _left:
        worker.thread.join(max(0.0, until_s - time.monotonic()))
