"""One thread for each worker, Ctrl-C as at a terminal, and the lanes of the tests.

Two workers of two threads wait for one another on two cores. The limit is set in the environment,
so that tests which need no torch import none; child processes inherit it.
"""

from __future__ import annotations

import os
import signal

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OMP", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"

# A shell starts background jobs with SIGINT ignored, and Python keeps it so.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the mark from the first N cases of a test marked `slow(sample=N)`: they run by default.

    Comes before pytest selects by marks.
    """
    n_seen: dict[str, int] = {}
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is None or "sample" not in slow.kwargs:
            continue
        test = item.nodeid.partition("[")[0]
        n_seen[test] = n_seen.get(test, 0) + 1
        if n_seen[test] <= slow.kwargs["sample"]:
            item.own_markers.remove(slow)
