"""`fit` with a disk behind a small host: bits, and faults of the disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import fit, plans_of, remove
from scheduler_runtime.execute.spill_file import CopyError
from solver.sizes_deadlines_progress import BudgetError
from tests.scheduler_runtime.fitting.test_fitting_with_host import (
    adamw,
    budget_for,
    numbers,
    tower,
    trained,
)
from tests.support.bitwise import assert_equal
from tests.support.paths import ROOT

BATCH = numbers(256)
HOST_BYTES = 80_000
"""For a few of the storages that are away."""


def fitted(directory: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tower()
    optimizer = adamw(model.parameters())
    options = {
        "budget": budget_for(model, BATCH, 0.6),
        "host_budget": HOST_BYTES,
        "host_link": 1e14,
        "disk_budget": f"1GB:{directory}",
        "disk_rate": 1e14,
        "time_limit_s": 6000,  # the first plan of a loss outside has a twentieth of it
        **options,
    }
    return fit(model, optimizer=optimizer, **options), optimizer


def plain(batches: list[Any]) -> list[torch.Tensor]:
    model = tower()
    return trained(model, adamw(model.parameters()), batches)


def assert_spills(model: nn.Module) -> None:
    for plan in plans_of(model):
        assert plan.solution.simulation.disk_peak_bytes > 0
        assert plan.solution.simulation.host_peak_bytes <= HOST_BYTES


@pytest.mark.slow
def test_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = fitted(tmp_path)
    assert_equal(plain([BATCH] * 2), trained(model, optimizer, [BATCH] * 2))
    assert_spills(model)
    assert not list(tmp_path.iterdir())
    remove(model)
    model(BATCH[0]).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "share", "options"),
    [
        ([BATCH] * 4, 0.6, {"n_micro": 2}),
        ([BATCH] * 2, 0.3, {"autocast": True}),
        ([numbers(192), BATCH, numbers(192)], 0.6, {}),
    ],
    ids=["accumulation", "autocast", "several shapes"],
)
def test_the_same_bits_in_other_steps(
    tmp_path: Path, batches: list[Any], share: float, options: dict[str, Any]
) -> None:
    model, optimizer = fitted(tmp_path, budget=budget_for(tower(), BATCH, share))
    expected = trained(plain := tower(), adamw(plain.parameters()), batches, **options)
    assert_equal(expected, trained(model, optimizer, batches, **options))
    assert_spills(model)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_disk_that_is_full_or_gone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error before anything is run; once there is room again the training goes on."""
    directory = tmp_path / "disk"
    directory.mkdir()
    model, optimizer = fitted(directory)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        if fault == "full":
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(CopyError, match="No space left on device; nothing was run"):
                model(BATCH[0])
        else:
            directory.rmdir()
            with pytest.raises((CopyError, BudgetError), match=r"[Nn]o such (file or )?directory"):
                model(BATCH[0])
            directory.mkdir()
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(plain([BATCH] * 2), trained(model, optimizer, [BATCH] * 2))
    assert_spills(model)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_in_a_later_step(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are as before that step."""
    model, optimizer = fitted(tmp_path)
    trained(model, optimizer, [BATCH])
    before = [parameter.clone() for parameter in model.parameters()]

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(CopyError, match="the disk in '"):
            trained(model, optimizer, [BATCH])
    assert_equal(before, model.parameters())
    trained(model, optimizer, [BATCH])
    assert not list(tmp_path.iterdir())


PROCESS = """
import os, signal, sys
from pathlib import Path
import torch
from tests.scheduler_runtime.fitting.test_fitting_with_disk import BATCH, fitted, plain, trained
from tests.support.bitwise import assert_equal
model, optimizer = fitted(Path(sys.argv[1]))
if sys.argv[2] == "killed":
    loss = model(BATCH[0]).sum()
    print(len(os.listdir(sys.argv[1])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
assert_equal(plain([BATCH] * 2), trained(model, optimizer, [BATCH] * 2))
print("same")
"""


def process(directory: Path, word: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(directory), word],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_process_and_two_in_one_directory(tmp_path: Path) -> None:
    killed = process(tmp_path, "killed")
    assert killed.communicate()[0].split() == ["0"]  # the file has no name even then
    assert killed.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    both = [process(tmp_path, "trains") for _ in range(2)]
    assert [each.communicate()[0].split()[-1] for each in both] == ["same", "same"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_budget": None, "host_link": None}, BudgetError, "no host memory, through which"),
        ({"disk_rate": None}, BudgetError, "the disk's rates are unknown"),
        ({"disk_budget": None}, BudgetError, "a rate of the disk is given .* but no disk"),
        ({"disk_budget": "1GB"}, ValueError, "fit needs a directory on the disk"),
        ({"disk_budget": "1GB:/no/such"}, BudgetError, "'/no/such': no such directory"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        fitted(tmp_path, budget="1GB", **options)
