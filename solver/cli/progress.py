"""A spinner on stderr; if stderr is not a terminal, lines of what takes long, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]


class Progress:
    """quiet: show nothing, even on a terminal."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._quiet = quiet
        self._shown = self._console.is_terminal and not quiet

    def tells(self, line: str) -> None:
        """Write a line that stays."""
        text = f"solve: {' '.join(line.split())}"
        self._console.print(text, soft_wrap=True, markup=False, emoji=False)

    @contextlib.contextmanager
    def says(self, what: str, *, always: bool = False) -> Iterator[Say]:
        """Show `what` while the block runs; the yielded function appends how far it is.

        always: write it as lines where there is no terminal; for what takes minutes.
        """
        if not self._shown:
            written = always and not self._quiet
            yield lambda far: self._console.print(f"{what}: {far}") if written else None
            return
        with self._console.status(what) as status:
            yield lambda how_far: status.update(f"{what}: {how_far}")
