"""Ctrl-C ends the command within two seconds, whatever it is doing.

Python runs signal handlers in the main thread, between two bytecode instructions. So a pass through
autograd, or building a large model, can delay them, and code that catches every exception can
swallow the KeyboardInterrupt. A second thread therefore waits for signals: if the command still
runs GRACE_S after a Ctrl-C, or at once at the second Ctrl-C, that thread prints the results so far
and ends the process.

The interpreter's C code notifies the thread of a signal through a socket
(`signal.set_wakeup_fd`).
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
"""How long after Ctrl-C the main thread has to end the command itself."""
PRINTING_S = 1.5
"""How long it then has to finish printing: the table of a step may have thousands of ops."""


class Watch:
    """A thread that ends the process after Ctrl-C if the main thread does not.

    print_result: prints the final message or report in place of the main thread, and returns the
        exit code. The command replaces it whenever it has found more to print.
    was_pressed: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.print_result: Callable[[], int] = lambda: INTERRUPTED
        self.was_pressed = False
        self._printing = threading.Lock()

    def start(self) -> None:
        """Start the thread. Has no effect if the handler for Ctrl-C is not Python's default one:
        a background job ignores Ctrl-C."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):  # a child must not send its signals here
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        both = (reading, writing)
        threading.Thread(target=self._wait, args=both, name="ctrl-c", daemon=True).start()

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Around printing by the main thread, so that the two threads do not print at once.

        Blocks until the process ends if the other thread is printing already.
        """
        with self._printing:
            yield

    def print_last(self, print_result: Callable[[], int]) -> int:
        """Print the final message or report from the main thread by calling `print_result`; returns
        its exit code. The other thread then prints nothing more."""
        with self.printing():
            code = print_result()
            self.print_result = lambda: code
        return code

    def _wait(self, reading: socket.socket, _writing: socket.socket) -> None:
        _next_ctrl_c(reading, timeout_s=None)
        self.was_pressed = True
        _next_ctrl_c(reading, timeout_s=GRACE_S)
        if not self._printing.acquire(timeout=PRINTING_S):
            os._exit(INTERRUPTED)  # the main thread is blocked: nobody reads stdout
        code = INTERRUPTED
        threading.Timer(GRACE_S, os._exit, (code,)).start()  # in case nobody reads stdout
        try:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\r")  # show the cursor, which the spinner hid
            code = self.print_result()
        finally:
            exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for any thread."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _next_ctrl_c(reading: socket.socket, *, timeout_s: float | None) -> bool:
    """Wait for Ctrl-C; False if none comes within `timeout_s` (None: wait for ever).

    Other signals that Python handles are ignored.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        readable, _, _ = select.select([reading], [], [], left_s)
        if not readable:
            return False
        if reading.recv(1)[0] == signal.SIGINT:
            return True
