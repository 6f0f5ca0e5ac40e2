"""Plans that copy to a disk: its directory, a disk that is full or fails, several processes."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.execute.spill_file import CopyError
from solver import solve
from solver.schedule import Solution, baseline, simulate
from tests.scheduler_runtime.execute.test_copies import Tower, by_disk, solution_of
from tests.support.bitwise import assert_bitwise_identical, assert_equal, one_step
from tests.support.paths import ROOT


def planned_for_disk(directory: Path) -> tuple[nn.Module, torch.Tensor, Solution]:
    """What `auto` plans where the host has room for little."""
    torch.manual_seed(0)
    model, batch = Tower(3), Tower.batch()
    graph = trace(model, batch)
    plain = simulate(graph, baseline(graph))
    budget_bytes = graph.resident_bytes + int(0.7 * (plain.peak_bytes - graph.resident_bytes))
    solution = solve(
        graph,
        budget=budget_bytes,
        host_budget=plain.peak_bytes // 10,
        host_link=1e14,
        disk_budget=f"1GB:{directory}",
        disk_rate=1e14,
        time_limit_s=600,
    )
    return model, batch, solution


@pytest.mark.slow
def test_a_plan_for_a_disk_runs_with_the_directory_that_it_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = os.pwrite

    def counted(file: int, data: Any, at: int) -> int:
        written.append(len(data))
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", counted)
    model, batch, solution = planned_for_disk(tmp_path)
    assert solution.simulation.n_recomputed == 0
    assert solution.simulation.disk_peak_bytes > 0
    assert_bitwise_identical(model, apply(copy.deepcopy(model), solution), batch)
    assert sum(written) >= solution.simulation.disk_peak_bytes
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_directory_of_a_plan_may_be_gone_or_another(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    model, batch, solution = planned_for_disk(tmp_path / "first")
    solution.save(tmp_path / "schedule.json")
    (tmp_path / "first").rmdir()
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json")
    with pytest.raises(CopyError, match=r"first', and the disk refuses them: No such file"):
        planned(batch)
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json", disk_directory=tmp_path)
    assert_bitwise_identical(model, planned, batch)


def spilling(tmp_path: Path) -> tuple[nn.Module, nn.Module, torch.Tensor, Solution]:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    solution = solution_of(graph, by_disk(graph, baseline(graph)))
    return model, copy.deepcopy(model), batch, solution


def test_a_disk_needs_a_directory(tmp_path: Path) -> None:
    _, planned, _, solution = spilling(tmp_path)
    with pytest.raises(ValueError, match="to a disk: name a directory there, apply"):
        apply(planned, solution)
    assert "forward" not in vars(planned)


@pytest.mark.slow
def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    _, planned, batch, solution = spilling(tmp_path)
    apply(planned, solution, disk_directory=tmp_path / "gone")
    with pytest.raises(CopyError, match=r"'.*gone', and the disk refuses them: No such file"):
        planned(batch)


def test_a_full_disk_is_an_error_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, planned, batch, solution = spilling(tmp_path)
    apply(planned, solution, disk_directory=tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(CopyError, match=r"No space left on device; nothing was run"):
            planned(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(model.buffers(), planned.buffers())
    assert_bitwise_identical(model, planned, batch)  # once there is room
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
@pytest.mark.parametrize("how", ["error", "short"])
def test_a_disk_that_fails_in_the_step(
    call: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, planned, batch, solution = spilling(tmp_path)
    apply(planned, solution, disk_directory=tmp_path)

    def fails(*_: Any) -> int:
        if how == "short":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(CopyError, match=r"a copy of a tensor could not be .* the disk in '"):
            one_step(planned, batch, 0)
    assert all(parameter.grad is None for parameter in planned.parameters())
    state = planned.state_dict()  # with the running statistics
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    gc.collect()
    assert_bitwise_identical(model, planned, batch)


PROCESS = """
import os, signal, sys
from pathlib import Path
import torch
from scheduler_runtime import apply
from tests.scheduler_runtime.execute.test_copies_to_disk import spilling
from tests.support.bitwise import assert_equal, one_step
directory, seed, killed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "killed"
model, planned, batch, solution = spilling(directory)
apply(planned, solution, disk_directory=directory)
if killed:
    loss = planned(batch)
    print(len(os.listdir(directory)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
plain, found = one_step(model, batch + seed, seed), one_step(planned, batch + seed, seed)
assert_equal(plain, found)
print("same")
"""


def process(directory: Path, seed: int, word: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(directory), str(seed), word],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_processes_in_one_directory(tmp_path: Path) -> None:
    """A killed one leaves nothing behind, and two at once do not meet."""
    killed = process(tmp_path, 0, "killed")
    said, _ = killed.communicate(timeout=600)
    assert (killed.returncode, said) == (-signal.SIGKILL, "0\n")
    assert not list(tmp_path.iterdir())
    both = [process(tmp_path, seed, "runs") for seed in (1, 2)]
    assert [each.communicate(timeout=600)[0] for each in both] == ["same\n", "same\n"]
    assert not list(tmp_path.iterdir())
