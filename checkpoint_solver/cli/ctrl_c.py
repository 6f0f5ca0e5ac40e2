"""Ctrl-C ends the command within two seconds, whatever it is doing.

Python hands a signal to the main thread, between two of its instructions. So a pass through
autograd, or building a large model, can hold it up, and code that catches everything can swallow
the KeyboardInterrupt. A second thread waits for signals: where the command still runs GRACE_S after
one, it says what there is to say and ends the process. It does so at once at the second Ctrl-C.

The interpreter's own C code tells it of the signal (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from checkpoint_solver.cli import INTERRUPTED

GRACE_S = 1.2
"""For the main thread to end the command itself."""
SPEAKING_S = 1.5
"""For it to end what it is printing by then: the table of a step of thousands of ops."""


class Watch:
    """say: writes what there is to say where the main thread does not get to it, and returns the
    exit code. Replaced when there is more to say than that nothing was found.
    heard: a Ctrl-C has come.
    """

    def __init__(self) -> None:
        self.say: Callable[[], int] = lambda: INTERRUPTED
        self.heard = False
        self._streams = threading.Lock()

    def start(self) -> None:
        """Watch this process. Without effect where Ctrl-C does something else than to raise
        KeyboardInterrupt: in a background job it is ignored."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):  # the signals of a child are its own
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        both = (reading, writing)
        threading.Thread(target=self._wait, args=both, name="ctrl-c", daemon=True).start()

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """The main thread prints. Where the other one does, it waits for the end of the process."""
        with self._streams:
            yield

    def last_word(self, say: Callable[[], int]) -> int:
        """The main thread says what there is to say, and nothing is left for the other one."""
        with self.speaking():
            code = say()
            self.say = lambda: code
        return code

    def _wait(self, reading: socket.socket, _writing: socket.socket) -> None:
        _next_ctrl_c(reading, timeout_s=None)
        self.heard = True
        _next_ctrl_c(reading, timeout_s=GRACE_S)
        if not self._streams.acquire(timeout=SPEAKING_S):
            os._exit(INTERRUPTED)  # nobody reads what the main thread prints
        code = INTERRUPTED
        threading.Timer(GRACE_S, os._exit, (code,)).start()  # nobody may read what is said
        try:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\r")  # the cursor, which the spinner has hidden
            code = self.say()
        finally:
            leave(code)


def leave(code: int) -> NoReturn:
    """End the process without waiting for any thread."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _next_ctrl_c(reading: socket.socket, *, timeout_s: float | None) -> bool:
    """Whether one came in that time. Other signals that Python handles are passed over."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        readable, _, _ = select.select([reading], [], [], left_s)
        if not readable:
            return False
        if reading.recv(1)[0] == signal.SIGINT:
            return True
