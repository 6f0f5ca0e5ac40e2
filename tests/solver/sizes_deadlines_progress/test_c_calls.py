"""Calls that Ctrl-C can end, several of them at once. What Ctrl-C does: `tests/cli`."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from solver.sizes_deadlines_progress import c_calls, interruptible, run_in_parallel

LONG_S = 60.0


def names_at_once(monkeypatch: pytest.MonkeyPatch, n_calls: int, n_processors: int) -> list[str]:
    """The threads of calls, of which each waits until as many as there are processors run."""
    monkeypatch.setattr(c_calls, "_n_processors", lambda: n_processors)
    all_there = threading.Barrier(n_processors)

    def call() -> str:
        all_there.wait(LONG_S)
        return threading.current_thread().name

    return run_in_parallel([call] * n_calls)


@pytest.mark.parametrize(("n_calls", "n_processors"), [(1, 1), (4, 1), (4, 2), (4, 4), (9, 3)])
def test_as_many_calls_run_at_once_as_there_are_processors(
    n_calls: int, n_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the barrier would break."""
    names = names_at_once(monkeypatch, n_calls, n_processors)
    assert len(names) == n_calls
    assert threading.current_thread().name not in names


def test_threads_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS starts helpers for each thread that it is called in."""
    before = threading.active_count()
    for _ in range(5):
        names_at_once(monkeypatch, 6, 3)
    assert threading.active_count() <= max(before, 3 + before)
    idle = len(c_calls._idle)
    names_at_once(monkeypatch, 2, 2)
    assert len(c_calls._idle) == idle
    c_calls.end_idle_workers()
    assert not c_calls._idle


def test_results_come_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_calls, "_n_processors", lambda: 2)
    second_ended = threading.Event()

    def first() -> int:
        assert second_ended.wait(LONG_S)
        return 1

    def second() -> int:
        second_ended.set()
        return 2

    assert run_in_parallel([first, second, lambda: 3]) == [1, 2, 3]
    assert run_in_parallel([]) == []


def test_what_a_call_raises_is_raised() -> None:
    def call(n: int) -> int:
        if n == 2:
            raise ValueError(n)
        return n

    with pytest.raises(ValueError, match="2"):
        run_in_parallel([partial(call, n) for n in range(4)])
    assert interruptible(lambda: 5) == 5  # and the next one is run


def test_outside_of_the_main_thread_calls_run_in_turn() -> None:
    names: list[str] = []
    thread = threading.Thread(
        target=lambda: names.extend(run_in_parallel([lambda: threading.current_thread().name] * 3)),
        name="another",
    )
    thread.start()
    thread.join()
    assert names == ["another"] * 3
