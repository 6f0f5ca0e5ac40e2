"""One thread for each worker, no part for the clock, Ctrl-C as at a terminal, the lanes, and less
work for `gc.collect`.

Two workers of two threads wait for one another on two cores. The limit is set in the environment,
so that tests which need no torch import none; child processes inherit it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OMP", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"

# A shell starts background jobs with SIGINT ignored, and Python keeps it so.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def searches_are_not_ended_by_the_clock() -> Iterator[None]:
    """In this process; `tests/whole/test_notebooks.py` does the same in those of notebooks."""
    from tests.support.time_limits import deadline, extended  # after the number of threads is set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline.Deadline, "after", extended)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the cases of a test marked `slow(sample=N, keep=M)` among the lanes.

    The first N run by default (none). Of the others, M that lie evenly apart stay slow (KEPT) and
    the rest become `exhaustive`, a lane of its own. Comes before pytest selects by marks.
    """
    cases: dict[str, list[tuple[pytest.Item, pytest.Mark]]] = {}
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append((item, slow))
    for of_test in cases.values():
        n_default = of_test[0][1].kwargs.get("sample", 0)
        for item, slow in of_test[:n_default]:
            item.own_markers.remove(slow)
        others = of_test[n_default:]
        n_slow = min(of_test[0][1].kwargs.get("keep", KEPT), len(others))
        kept = {i * len(others) // n_slow for i in range(n_slow)}
        for i, (item, _) in enumerate(others):
            if i not in kept:
                item.add_marker("exhaustive")
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.own_markers = [mark for mark in item.own_markers if mark.name not in LANES]


KEPT = 2
"""Cases of a slow test that stay so: hundreds of them would make CI take hours."""
LANES = ("slow", "distributed")
"""The marks that `exhaustive` takes the place of."""
N_MODULES = 200
"""So many newly imported modules are worth a look at all objects."""
N_TESTS = 25
"""After so many tests what they have left in caches is worth it, too."""
_n_frozen_modules = 0
_n_tests = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Spare later garbage collections the objects that are there to stay: modules, caches.

    Tests that measure memory collect garbage first, some many times. Each takes half a second
    beside torch and transformers, and more beside what a thousand tests have left.
    What is frozen is not freed any more if it becomes part of a cycle, so it is done between tests
    only, and not between all of them.
    """
    global _n_frozen_modules, _n_tests
    _n_tests += 1
    if len(sys.modules) > _n_frozen_modules + N_MODULES or _n_tests % N_TESTS == 0:
        gc.collect()
        gc.freeze()
        _n_frozen_modules = len(sys.modules)
    return (yield)
