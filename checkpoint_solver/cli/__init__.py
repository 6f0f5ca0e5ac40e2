"""The command `solve`. Its modules are imported only when needed, so `--version` is immediate."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator, Sequence

INTERRUPTED = 128 + int(signal.SIGINT)
"""The exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command without changing settings of this process; returns the exit code.

    argv: the arguments without the program's name (None: those of this process).
    """
    if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
        return _say_version()
    from checkpoint_solver.cli import command

    return command.main(argv)


def process() -> int:
    """Run the command as a process of its own (`solve`, `python -m checkpoint_solver`).

    Ctrl-C ends it from the first import on. Settings that it changes for the whole process are not
    restored.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            return _say_version()
        codes: list[int] = []
        atexit.register(_exit_at_once, codes)  # called last, after what later imports register
        with _ctrl_c_ends_process():
            from checkpoint_solver.cli import command
        codes.append(command.process())
        return codes[0]
    except KeyboardInterrupt:  # before or after `command.process` handles it
        _say_interrupted()
        return INTERRUPTED


def _exit_at_once(codes: Sequence[int]) -> None:
    """End a process that has an exit code without freeing its objects.

    Importing PyTorch creates a million of them. Python would search them for garbage, which takes
    longer than a small problem; where it does not (`gc.freeze`), triton 3.9 prints them as leaks.
    """
    if codes:
        from checkpoint_solver.cli.ctrl_c import exit_now

        exit_now(codes[0])


def version() -> str:
    """The installed version, or "0 (not installed)" in a source tree."""
    from importlib import metadata

    try:
        return metadata.version("checkpoint-solver")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


def _say_version() -> int:
    print(f"solve {version()}")
    return 0


@contextlib.contextmanager
def _ctrl_c_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process at once while modules are imported, some of which would catch
    KeyboardInterrupt.

    Has no effect if the program has replaced Python's default handler for Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(_signal: int, _frame: object) -> None:
        try:
            _say_interrupted()
        finally:
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _say_interrupted() -> None:
    """Report the interruption as `command` does once it is imported."""
    print("solve: interrupted", file=sys.stderr, flush=True)
    if "--json" in sys.argv[1:]:
        answer = f'{{"status": "error", "error": "interrupted", "exit_code": {INTERRUPTED}}}'
        print(answer, flush=True)


def parser() -> ArgumentParser:
    """The command-line parser, for shell completion: `shtab checkpoint_solver.cli.parser`.

    It accepts several files, so that those of `solve explain schedule.json graph.json` complete.
    """
    from checkpoint_solver.cli import arguments

    command = arguments.parser()
    (problem,) = command._get_positional_actions()
    problem.nargs = "*"
    return command
