"""Progress messages for callers from Python: one line at the start, one at the end.

Everything that takes seconds (`solve`, `sweep`, `verify`, `compile`, the first step of `fit` and
`apply`) reports here, as records of level INFO of the logger `checkpoint_solver`:

- If logging is configured (the program or a library has added a handler), the records go there and
  nothing is printed.
- Otherwise they are printed on stderr, and a terminal also shows live progress. In a notebook they
  are ordinary output. Of several processes under torchrun only the first prints.

To turn them off: `logging.getLogger("checkpoint_solver").setLevel(logging.WARNING)`. Without a
handler, these turn them off too: `propagate = False` on that logger, a level of the root logger
that is above INFO and not its default (WARNING), and `logging.disable`. Warnings are not reported
here; they come from the loggers of the modules.

Imports Rich only for a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

from solver.sizes_deadlines_progress.progress_in_logs import Say, log_progress

logger = logging.getLogger("checkpoint_solver")


class _Stage:
    """A stage being reported. what: the current line. show: displays a new line."""

    def __init__(self, what: str, show: Say) -> None:
        self.what, self._show = what, show

    def say(self, line: str) -> None:
        self.what = line
        self._show(line)


_outer: ContextVar[_Stage | None] = ContextVar("_outer", default=None)
"""The outermost stage being reported; stages inside it only replace its line."""


def tell(line: str) -> None:
    """Report a result in one line. Inside `telling` nothing is reported: only the outermost caller
    reports its result."""
    if _outer.get() is None:
        _write(line)


@contextlib.contextmanager
def telling(what: str, *, in_lines: bool = False) -> Iterator[Say]:
    """Report that `what` is running; the yielded function replaces that line by a newer one.

    Inside another `telling`, the line of the outer one shows `what` until the inner block ends.

    in_lines: print plain lines on a terminal too. For use inside a training step: the training may
        show a progress bar, and two live displays would overwrite each other.
    """
    outer = _outer.get()
    if outer is not None:  # only replace the line of the outermost stage
        before = outer.what
        outer.say(what)
        yield outer.say
        outer.say(before)
        return
    _write(what)
    is_live = not in_lines and not logger.hasHandlers() and _is_printed() and _stream().isatty()
    with _spinner(what) if is_live else log_progress(what, _write) as show:
        stage = _Stage(what, show)
        token = _outer.set(stage)
        try:
            yield stage.say
        finally:
            _outer.reset(token)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Report nothing inside this context, for callers that report by themselves."""
    token = _outer.set(_Stage("", lambda _line: None))
    try:
        yield
    finally:
        _outer.reset(token)


def _write(line: str) -> None:
    if logger.hasHandlers():
        logger.info("%s", line)
    elif _is_printed():
        print(line, file=_stream(), flush=True)


def _is_printed() -> bool:
    """Whether lines are printed when logging is not configured."""
    is_default = logger.level == logging.NOTSET and logging.root.level == logging.WARNING
    is_above = logger.getEffectiveLevel() > logging.INFO and not is_default
    is_disabled = logging.root.manager.disable >= logging.INFO or not logger.propagate
    is_off = is_above or is_disabled
    is_first = os.environ.get("RANK", "0") == "0"
    return is_first and not is_off and _stream() is not None


def _stream() -> TextIO:
    """stderr, or stdout in a notebook, which would show stderr as an error. May be None."""
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    return sys.stdout if in_notebook else sys.stderr


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[Say]:
    """Show a live line with the time passed on the terminal; it is removed at the end."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    # What the model prints while it is traced goes to stdout; redirect it through Rich only if that
    # is the terminal too.
    to_file = not sys.stdout.isatty()
    console = Console(file=_stream(), highlight=False)
    with Progress(*columns, console=console, transient=True, redirect_stdout=not to_file) as shown:
        task = shown.add_task(what, total=None)
        yield lambda line: shown.update(task, description=line)
