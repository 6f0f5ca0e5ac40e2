"""Calls of C code that Ctrl-C can end.

Python runs signal handlers in the main thread, between two bytecode instructions. So Ctrl-C has no
effect until a call of C code returns, and a single linear program may use the whole time limit.
Here such a call runs in another thread, and the main thread waits for it, which a signal does
interrupt. The call itself cannot be stopped: it runs on until its own time limit, and the exiting
process waits for it only ABANDONED_WAIT_S. Several calls run in parallel, at most one per
processor.

This works only for C code that releases the GIL, as HiGHS does in highspy and in SciPy from 1.15
on.
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
"""How often the waiting main thread checks whether Ctrl-C was pressed."""
ABANDONED_WAIT_S = 1.0
"""How long the exiting process waits for abandoned calls. C++ code that returns to an interpreter
that is shutting down aborts the process, so calls that are nearly done may finish first."""

_R = TypeVar("_R")


class _Worker:
    """A thread that runs one call after another. It is reused, since HiGHS starts helper threads of
    its own for each thread that calls it."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # a daemon, so that the process can exit while a call is still running
        self.thread = threading.Thread(target=self._work, name="solver-calls", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (given := self.calls.get()) is not None:
            future, call = given
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 (raised again in the waiting thread)
                future.set_exception(error)
            del given, future, call


_idle: list[_Worker] = []
"""Workers without a call. Only the main thread uses this list."""
_abandoned: list[_Worker] = []
"""Workers with an abandoned call: it still runs, but nobody waits for it any more."""


def interruptible(call: Callable[[], _R]) -> _R:
    """Run one call of C code so that Ctrl-C ends the wait for it; see `run_in_parallel`."""
    return run_in_parallel([call])[0]


def run_in_parallel(calls: Sequence[Callable[[], _R]]) -> list[_R]:
    """Run the calls in parallel threads and return their results in order; Ctrl-C ends the wait.

    Outside the main thread, where no signal arrives, the calls run directly, one after another.

    Raises whatever a call raises, KeyboardInterrupt on Ctrl-C, and OutOfTimeError if Ctrl-C was
    pressed inside `ctrl_c_ends_searches`.
    """
    if threading.current_thread() is not threading.main_thread():
        return [call() for call in calls]
    queue, results = deque(enumerate(calls)), dict[int, _R]()
    run_from_queue = partial(_run_from_queue, queue, results)
    workers = _take_workers(min(len(calls), _n_processors()))
    futures = [Future[None]() for _ in workers]
    try:
        for worker, future in zip(workers, futures, strict=True):
            worker.calls.put((future, run_from_queue))
        while wait(futures, timeout=POLL_S).not_done:
            if interrupted():
                raise OutOfTimeError
    except BaseException:
        # Abandon the calls: those not yet started are dropped, the workers end after theirs.
        queue.clear()
        atexit.unregister(_wait_for_abandoned)  # register it only once
        atexit.register(_wait_for_abandoned)
        _abandoned.extend(workers)
        for worker in workers:
            worker.calls.put(None)
        raise
    _idle.extend(workers)
    for future in futures:
        future.result()
    return [results[index] for index in range(len(calls))]


def _run_from_queue(queue: deque[tuple[int, Callable[[], _R]]], results: dict[int, _R]) -> None:
    """Take calls from the shared queue `queue` until it is empty; runs in each worker thread.

    queue: (index, call) pairs. results: index -> what the call returned; filled here.
    """
    while True:
        try:
            index, call = queue.popleft()
        except IndexError:
            return
        results[index] = call()


def _take_workers(n_workers: int) -> list[_Worker]:
    """Take idle workers, and start new ones if there are too few."""
    idle = [_idle.pop() for _ in range(min(n_workers, len(_idle)))]
    # after a fork, the parent's threads do not exist in the child
    alive = [worker for worker in idle if worker.thread.is_alive()]
    return alive + [_Worker() for _ in range(n_workers - len(alive))]


def _n_processors() -> int:
    """The number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def end_idle_workers() -> None:
    """End the idle worker threads; the next call starts new ones.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        for worker in _idle:
            worker.calls.put(None)
        for worker in _idle:
            worker.thread.join()
        _idle.clear()


# At exit, while the interpreter still works: during its shutdown threads cannot end cleanly.
atexit.register(end_idle_workers)


def abandoned_calls_are_running() -> bool:
    """Whether abandoned calls are still running."""
    _abandoned[:] = [worker for worker in _abandoned if worker.thread.is_alive()]
    return bool(_abandoned)


def _wait_for_abandoned() -> None:
    """Wait at most ABANDONED_WAIT_S, in all, for the abandoned calls."""
    until_s = time.monotonic() + ABANDONED_WAIT_S
    for worker in _abandoned:
        worker.thread.join(max(0.0, until_s - time.monotonic()))
