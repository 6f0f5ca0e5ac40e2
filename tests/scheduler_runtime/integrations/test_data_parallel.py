"""`fit` inside DistributedDataParallel: two processes on the CPU, with and without the plan."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import FitError, fit
from tests.support.bitwise import assert_equal
from tests.support.paths import ROOT

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found (see tests/support/ddp_worker.py)."""
    folder = tmp_path_factory.mktemp("ddp")
    outs = [folder / f"{rank}.pt" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.ddp_worker",
                str(rank),
                str(folder / "meet"),
                str(out),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=600)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(out) for out in outs]


@pytest.mark.parametrize("buckets", ["copies", "views", "kept views", "unused", "host", "disk"])
def test_each_process_has_the_same_bits_as_without_a_plan(
    found: list[dict[str, Any]], buckets: str
) -> None:
    for process in found:
        run = process[buckets]
        assert len(run["plain"]) == len(run["fitted"])
        assert_equal(run["plain"], run["fitted"])
        what = f"{buckets}_bytes" if buckets in ("host", "disk") else "n_recomputed"
        assert all(plan[what] > 0 for plan in run["plans"])
    losses, gradients = (slice(0, 3), slice(3, 10))
    first, second = (process[buckets]["fitted"] for process in found)
    assert not any(map(torch.equal, first[losses], second[losses]))  # each has its own batches
    assert_equal(first[gradients], second[gradients])  # they were averaged


def test_nothing_is_left_on_the_disk_of_both_processes(found: list[dict[str, Any]]) -> None:
    assert [process["left on the disk"] for process in found] == [[], []]


def test_memory_that_runs_short_in_one_process_leaves_the_bits_of_both(
    found: list[dict[str, Any]],
) -> None:
    for process in found:
        assert_equal(process["short"]["plain"], process["short"]["fitted"])
    n_plans = [len(process["short"]["plans"]) for process in found]
    assert n_plans[0] == 2 < n_plans[1]


def test_copies_of_the_gradients_in_buckets_are_counted(found: list[dict[str, Any]]) -> None:
    alone, gradients_bytes = found[0]["alone"][0], found[0]["gradients_bytes"]
    state_bytes = found[0]["copies"]["plans"][0]["resident_bytes"] - alone["resident_bytes"]
    fresh, accumulating = found[0]["copies"]["plans"]
    assert (fresh["gradients"], accumulating["gradients"]) == ("fresh", "accumulate")
    assert accumulating["resident_bytes"] == fresh["resident_bytes"] + gradients_bytes
    # in no_sync, after zero_grad(), the gradients are not in the buckets
    assert [plan["resident_bytes"] for plan in found[0]["views"]["plans"]] == [
        fresh["resident_bytes"],
        accumulating["resident_bytes"],
    ]
    kept = found[0]["kept views"]["plans"][-1]  # the buckets are the gradients
    assert kept["gradients"] == "accumulate"
    assert kept["resident_bytes"] == fresh["resident_bytes"]
    assert state_bytes > 3 * gradients_bytes  # two moments, and the buckets
    assert any("gradient_as_bucket_view=True" in note for note in fresh["notes"])
    for name, is_told in (("views", True), ("kept views", False)):
        notes = found[0][name]["plans"][-1]["notes"]
        assert not any("gradient_as_bucket_view" in note for note in notes)
        assert is_told is any("zero_grad(set_to_none=False)" in note for note in notes)


def test_a_module_that_copies_itself_is_refused() -> None:
    with pytest.raises(FitError, match="DistributedDataParallel"):
        fit(nn.DataParallel(nn.Linear(2, 2)), budget="1GB")
