"""Binomial checkpointing: published counts, the recurrence, and schedules run step by step."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest

from solver.chain.binomial import Action, n_extra_steps, reversal
from tests.support.paths import DATA

BINOMIAL = json.loads((DATA / "binomial.json").read_text())


@cache
def recurrence(n_steps: int, n_snapshots: int) -> int:
    """t(n, s) = least over j of j + t(n-j, s-1) + t(j, s): the definition, without binomials."""
    if n_steps == 1:
        return 0
    if n_snapshots == 1:
        return n_steps * (n_steps - 1) // 2
    return min(
        j + recurrence(n_steps - j, n_snapshots - 1) + recurrence(j, n_snapshots)
        for j in range(1, n_steps)
    )


def execute(actions: Iterator[Action], *, n_steps: int, n_snapshots: int) -> int:
    """Run the actions as their words say, refuse what cannot be done, count the advanced steps."""
    present: int | None = 0
    stored: set[int] = set()
    n_advanced, not_reversed = 0, n_steps
    for kind, start, stop in actions:
        if kind == "store":
            assert start == stop == present
            assert start not in stored
            stored.add(start)
            assert len(stored) <= n_snapshots
        elif kind == "advance":
            assert present == start < stop < not_reversed
            n_advanced += stop - start
            present = stop
        elif kind == "reverse":
            assert present == stop == start - 1
            assert start == not_reversed
            present, not_reversed = None, stop
        elif kind == "restore":
            assert start == stop
            assert start in stored
            present = start
        else:
            assert kind == "drop"
            assert start == stop
            stored.remove(start)
    assert not_reversed == 0
    assert not stored
    return n_advanced


def n_advanced(n_steps: int, n_snapshots: int) -> int:
    actions = reversal(n_steps=n_steps, n_snapshots=n_snapshots)
    return execute(actions, n_steps=n_steps, n_snapshots=n_snapshots)


def test_dense_table() -> None:
    assert len(BINOMIAL["dense"]) == 756
    for n_steps, n_snapshots, n_extra in BINOMIAL["dense"]:
        assert n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots) == n_extra


@pytest.mark.parametrize("row", BINOMIAL["large"], ids=lambda row: f"{row['n']}-{row['s']}")
def test_large_table(row: dict[str, int]) -> None:
    assert n_extra_steps(n_steps=row["n"], n_snapshots=row["s"]) == row["extra"]


def test_closed_form_is_the_recurrence() -> None:
    for n_steps in range(1, 65):
        for n_snapshots in range(1, 13):
            n_extra = n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots)
            assert n_extra == recurrence(n_steps, n_snapshots), (n_steps, n_snapshots)


def test_closed_form_of_a_thousand_million_steps() -> None:
    """A loop over them, 200 times, would not end."""
    n = 10**9
    assert n_extra_steps(n_steps=n, n_snapshots=1) == n * (n - 1) // 2
    assert n_extra_steps(n_steps=n, n_snapshots=n) == n - 1
    assert n_extra_steps(n_steps=n, n_snapshots=n - 1) == n - 1
    # One snapshot short of one per repeated step: a single step of them runs twice.
    assert n_extra_steps(n_steps=n, n_snapshots=n - 2) == n
    by_snapshots = [n_extra_steps(n_steps=n, n_snapshots=s) for s in range(1, 200)]
    assert by_snapshots == sorted(by_snapshots, reverse=True)


def test_actions_of_a_small_chain_by_hand() -> None:
    assert list(reversal(n_steps=4, n_snapshots=2)) == [
        ("store", 0, 0),
        ("advance", 0, 2),
        ("store", 2, 2),
        ("advance", 2, 3),
        ("reverse", 4, 3),
        ("restore", 2, 2),
        ("drop", 2, 2),
        ("reverse", 3, 2),
        ("restore", 0, 0),
        ("advance", 0, 1),
        ("reverse", 2, 1),
        ("restore", 0, 0),
        ("drop", 0, 0),
        ("reverse", 1, 0),
    ]
    assert list(reversal(n_steps=1, n_snapshots=3)) == [
        ("store", 0, 0),
        ("drop", 0, 0),
        ("reverse", 1, 0),
    ]


def test_every_small_schedule_runs_and_is_optimal() -> None:
    for n_steps in range(1, 65):
        for n_snapshots in range(1, 13):
            n_extra = n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots)
            assert n_advanced(n_steps, n_snapshots) == n_extra, (n_steps, n_snapshots)


@pytest.mark.slow(sample=30)
@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_run_and_are_optimal(seed: int) -> None:
    rng = random.Random(seed)
    n_steps = rng.randint(65, 5000)
    # Few snapshots on long chains make quadratically many actions: the last choice is for those.
    n_snapshots = rng.choice([rng.randint(2, 12), rng.randint(13, 100), n_steps - 1, n_steps * 3])
    n_extra = n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots)
    assert n_advanced(n_steps, n_snapshots) == n_extra, (n_steps, n_snapshots)


def test_lengths_around_the_binomial_numbers() -> None:
    """C(s+r, s) steps is where the number of repetitions goes up by one."""
    for n_snapshots, longest in ((1, 200), (2, 1326), (3, 1771), (5, 2002), (10, 3003), (40, 861)):
        for n_steps in (longest - 1, longest, longest + 1):
            n_extra = n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots)
            assert n_advanced(n_steps, n_snapshots) == n_extra, (n_steps, n_snapshots)


@pytest.mark.parametrize(("n_steps", "n_snapshots"), [(1000, 10), (10_000, 20), (100_000, 30)])
def test_published_counts_are_attained(n_steps: int, n_snapshots: int) -> None:
    published = {(row["n"], row["s"]): row["extra"] for row in BINOMIAL["large"]}
    assert n_advanced(n_steps, n_snapshots) == published[n_steps, n_snapshots]


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize(
    ("n_steps", "n_snapshots"), [(100_000, 3), (100_000, 30), (10**9, 1), (10**9, 10**9)]
)
def test_memory_does_not_grow_with_the_steps(n_steps: int, n_snapshots: int) -> None:
    tracemalloc.start()
    try:
        for _ in islice(reversal(n_steps=n_steps, n_snapshots=n_snapshots), 200_000):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000


@pytest.mark.parametrize("n_snapshots", [1, 2, 3, 40, 1000, 10**6, 10**9])
def test_a_thousand_million_steps_start_at_once(n_snapshots: int) -> None:
    """Whatever goes through all of them would not end."""
    actions = list(islice(reversal(n_steps=10**9, n_snapshots=n_snapshots), 1000))
    assert actions[0] == ("store", 0, 0)
    assert actions[1][:2] == ("advance", 0)


@pytest.mark.parametrize("function", [n_extra_steps, reversal])
@pytest.mark.parametrize("bad", [0, -3, 2.0, "4", None, True])
def test_what_is_no_count_is_refused_at_once(function: object, bad: object) -> None:
    assert callable(function)
    shown = repr(bad)
    with pytest.raises(ValueError, match=rf"n_steps is {shown}; it must be"):
        function(n_steps=bad, n_snapshots=3)
    with pytest.raises(ValueError, match=rf"n_snapshots is {shown}; it must be"):
        function(n_steps=10, n_snapshots=bad)
