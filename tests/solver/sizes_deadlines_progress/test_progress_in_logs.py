"""What takes long is written now and then, also while it tells nothing itself."""

from __future__ import annotations

import threading

import pytest

from solver.sizes_deadlines_progress.progress_in_logs import Lines, log_progress

GUARD_S = 300
"""Ends a test that hangs."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 100.0}
    monkeypatch.setattr("solver.sizes_deadlines_progress.progress_in_logs.now_s", lambda: now["s"])
    return now


def seconds(written: list[str]) -> list[int]:
    return [int(line.rpartition("(")[2].split()[0]) for line in written]


def test_one_silent_stage_is_written_after_twice_as_long_each_time(clock):
    written: list[str] = []
    lines = Lines("planning Net (7 ops)...", written.append)
    for second in range(60):
        clock["s"] = 100.0 + second
        lines.tick()
    assert seconds(written) == [2, 4, 8, 16, 32]
    assert written[0] == "planning Net (7 ops) (2 s)..."


def test_hours_take_few_lines(clock):
    written: list[str] = []
    lines = Lines("sweeping", written.append)
    for second in range(10_000):
        clock["s"] = 100.0 + second
        lines.what = f"{second} of 10000 plans"
        lines.tick()
    assert seconds(written) == [2 * 2**n for n in range(13)]
    assert written[-1] == "8192 of 10000 plans (8192 s)..."


def test_a_thread_that_wakes_late_writes_one_line(clock):
    written: list[str] = []
    lines = Lines("tracing", written.append)
    clock["s"] = 109.0
    lines.tick()
    lines.tick()
    assert written == ["tracing (9 s)..."]
    assert lines.due_in_s == 7.0


def test_a_closed_stage_writes_nothing(clock):
    written: list[str] = []
    lines = Lines("tracing", written.append)
    clock["s"] = 109.0
    lines.close()
    lines.tick()
    assert written == []


def test_another_thread_writes_while_the_block_is_silent(monkeypatch):
    monkeypatch.setattr("solver.sizes_deadlines_progress.progress_in_logs.FIRST_AFTER_S", 0.001)
    came = threading.Event()
    written: list[tuple[str, threading.Thread]] = []

    def write(line: str) -> None:
        written.append((line, threading.current_thread()))
        if line.startswith("planning"):
            came.set()

    with log_progress("tracing...", write) as say:
        say("planning...")
        assert came.wait(GUARD_S)
    n_written = len(written)
    assert {thread for _, thread in written} != {threading.current_thread()}
    for _, thread in written:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    assert len(written) == n_written


def test_a_block_that_fails_writes_nothing_more(monkeypatch):
    ends = []
    monkeypatch.setattr(
        "solver.sizes_deadlines_progress.progress_in_logs.Lines.close",
        lambda _self: ends.append(True),
    )
    with pytest.raises(ValueError, match="no"), log_progress("tracing...", print):
        raise ValueError("no")
    assert ends == [True]
