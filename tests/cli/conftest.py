"""Model files; what the command writes does not depend on how busy the machine is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.command import write_model


@pytest.fixture(autouse=True)
def _no_lines_on_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, of stages that last: in this process. A test may ask for them again."""
    logs = "solver.sizes_deadlines_progress.progress_in_logs"
    monkeypatch.setattr(f"{logs}.FIRST_AFTER_S", 1e6)


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a model file, as `write_model`, and returns its path."""
    return partial(write_model, tmp_path)
