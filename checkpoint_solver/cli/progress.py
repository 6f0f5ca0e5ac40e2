"""A spinner on stderr; if stderr is not a terminal, an occasional line while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from solver.sizes_deadlines_progress import Say, log_progress


class Progress:
    """Shows on stderr what the command is doing.

    quiet: show nothing, even on a terminal.
    """

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._quiet = quiet

    def write_line(self, line: str) -> None:
        """Write a line that stays on the screen."""
        self._write(f"solve: {' '.join(line.split())}")

    @contextlib.contextmanager
    def showing(self, what: str, *, always: bool = False) -> Iterator[Say]:
        """Show `what` while the block runs; the yielded function appends how far it has got.

        always: without a terminal, write each such update at once, for blocks that take minutes.
        """
        if self._quiet:
            yield lambda _far: None
            return
        if self._console.is_terminal:
            with self._console.status(what) as status:
                yield lambda far: status.update(f"{what}: {far}")
            return
        with log_progress(what, self._write) as replace:

            def say(far: str) -> None:
                replace(f"{what}: {far}")
                if always:
                    self._write(f"{what}: {far}")

            yield say

    def _write(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, emoji=False)
