"""A spinner on stderr; silent if stderr is not a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]


class Progress:
    """quiet: show nothing, even on a terminal."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._shown = self._console.is_terminal and not quiet

    @contextlib.contextmanager
    def says(self, what: str) -> Iterator[Say]:
        """Show `what` while the block runs; the yielded function appends how far it is."""
        if not self._shown:
            yield lambda _how_far: None
            return
        with self._console.status(what) as status:
            yield lambda how_far: status.update(f"{what}: {how_far}")
