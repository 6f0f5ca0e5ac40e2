"""A fixture with the pools of host memory that programs make during a test."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_runtime.execute import copies as copies_module


@pytest.fixture
def made_pools(monkeypatch: pytest.MonkeyPatch) -> list[copies_module.Pool]:
    """The pools, in the order in which they are made."""
    made: list[copies_module.Pool] = []
    plain = copies_module.Pool.of

    def of(*args: Any) -> copies_module.Pool:
        made.append(plain(*args))
        return made[-1]

    monkeypatch.setattr(copies_module.Pool, "of", of)
    return made
