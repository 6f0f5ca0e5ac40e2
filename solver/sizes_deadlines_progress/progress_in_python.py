"""What runs, told to who calls from Python: a line at the start, one at the end.

Everything that takes seconds (`solve`, `sweep`, `verify`, `compile`, the first step of `fit` and
`apply`) tells it here, as records of level INFO of the logger `checkpoint_solver`:

- Where logging is configured (a handler is there, of the program or of a library), it alone decides
  what becomes of them; nothing is printed besides.
- Elsewhere they are printed on stderr, and a terminal shows meanwhile how far it is. A notebook
  shows them as ordinary output. Of several processes under torchrun only the first prints.

Off: `logging.getLogger("checkpoint_solver").setLevel(logging.WARNING)`. Where no handler is there,
`propagate = False` of that logger, a level above INFO of the root logger other than its default
(WARNING) and `logging.disable` turn them off too. Warnings are not told here; they come from the
loggers of the modules.

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

from solver.sizes_deadlines_progress.progress_in_logs import Say, now_and_then

logger = logging.getLogger("checkpoint_solver")


class _Stage:
    """Something that is told, and how far it is. show: displays that."""

    def __init__(self, what: str, show: Say) -> None:
        self.what, self._show = what, show

    def say(self, line: str) -> None:
        self.what = line
        self._show(line)


_outer: ContextVar[_Stage | None] = ContextVar("_outer", default=None)
"""What is told while parts of it run."""


def tell(line: str) -> None:
    """What came out, in one line; nothing within `telling`, of which it would be a part."""
    if _outer.get() is None:
        _write(line)


@contextlib.contextmanager
def telling(what: str, *, in_lines: bool = False) -> Iterator[Say]:
    """Tell `what` runs; the yielded function tells how far it is, in a line that replaces `what`.

    Parts that tell something themselves say with it how far this is, while they run.
    in_lines: with lines alone on a terminal too: for inside of a training step, as the training may
    show a progress bar there, and two live displays would write over each other.
    """
    outer = _outer.get()
    if outer is not None:
        before = outer.what
        outer.say(what)
        yield outer.say
        outer.say(before)
        return
    _write(what)
    is_live = not in_lines and not logger.hasHandlers() and _shown() and _stream().isatty()
    with _spinner(what) if is_live else now_and_then(what, _write) as show:
        stage = _Stage(what, show)
        token = _outer.set(stage)
        try:
            yield stage.say
        finally:
            _outer.reset(token)


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Nothing is told inside, by a caller that says itself what runs."""
    token = _outer.set(_Stage("", lambda _line: None))
    try:
        yield
    finally:
        _outer.reset(token)


def _write(line: str) -> None:
    if logger.hasHandlers():
        logger.info("%s", line)
    elif _shown():
        print(line, file=_stream(), flush=True)


def _shown() -> bool:
    """Whether lines are printed where logging is not configured."""
    is_default = logger.level == logging.NOTSET and logging.root.level == logging.WARNING
    is_above = logger.getEffectiveLevel() > logging.INFO and not is_default
    is_disabled = logging.root.manager.disable >= logging.INFO or not logger.propagate
    is_off = is_above or is_disabled
    is_first = os.environ.get("RANK", "0") == "0"
    return is_first and not is_off and _stream() is not None


def _stream() -> TextIO:
    """stderr; in a notebook, which shows that as an error, stdout. None where there is none."""
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    return sys.stdout if in_notebook else sys.stderr


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[Say]:
    """A line on the terminal with the time that has passed, gone at the end."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    # What the model prints while it is traced belongs where stdout goes, unless that is here too.
    to_file = not sys.stdout.isatty()
    console = Console(file=_stream(), highlight=False)
    with Progress(*columns, console=console, transient=True, redirect_stdout=not to_file) as shown:
        task = shown.add_task(what, total=None)
        yield lambda line: shown.update(task, description=line)
