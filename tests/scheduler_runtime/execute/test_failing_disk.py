"""A disk that fails in the middle of a step: gradients, buffers and random state afterwards."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime import apply, remove
from scheduler_runtime.execute.spill_file import CopyError
from solver.schedule import keep
from tests.scheduler_runtime.execute.test_copies import Tower, by_disk, solution_of
from tests.support.bitwise import assert_equal
from tests.support.failing_disk import failing_disk

NO_GRADIENT = r"No gradient of this forward pass has been added\. Buffers and random state are"
IN_PART = r"Gradients of this forward pass have been added to earlier ones in part: set all to None"


class Accumulating:
    """A model after the first micro-batch of a step, plain and with a plan that has a disk."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        torch.manual_seed(0)
        self.model = Tower()
        graph = trace(self.model, Tower.batch(), gradients="accumulate")
        schedule = by_disk(graph, keep(graph, ()), seed)
        self.solution = solution_of(graph, schedule)
        self.planned = apply(copy.deepcopy(self.model), self.solution, disk_directory=directory)
        self._parameters = copy.deepcopy(self.model.state_dict())
        self.batches = Tower.batch(), Tower.batch() + 1

    def restore_after_error(self, model: nn.Module) -> None:
        model.load_state_dict(self._parameters)
        model.zero_grad()
        torch.manual_seed(1)

    def first(self, model: nn.Module) -> list[torch.Tensor]:
        """Back to the start, and the first micro-batch."""
        self.restore_after_error(model)
        model(self.batches[0]).backward()
        return state(model)

    def second(self, model: nn.Module) -> list[torch.Tensor]:
        model(self.batches[1]).backward()
        return state(model)

    def n_calls(self, call: str) -> tuple[int, int]:
        """Of the second micro-batch: when its first gradient leaves, and in all."""
        self.first(self.planned)
        at_gradients: list[int] = []
        with (
            failing_disk(call) as disk,
            on_gradients(self.planned, lambda: at_gradients.append(disk.n)),
        ):
            self.second(self.planned)
        return at_gradients[0], disk.n


@contextmanager
def on_gradients(model: nn.Module, run: Callable[[], None]) -> Iterator[None]:
    """Called as each gradient leaves."""
    hooks = [parameter.register_hook(lambda _: run()) for parameter in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def state(model: nn.Module) -> list[torch.Tensor]:
    """Copies of gradients, parameters, buffers and the random state."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    of_model = [*gradients, *model.parameters(), *model.buffers()]
    return [each.detach().clone() for each in of_model] + [torch.get_rng_state()]


def n_gradients(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "short", "late"])
@pytest.mark.parametrize("seed", range(2))
def test_a_write_that_fails_leaves_everything_as_it_was(
    seed: int, how: str, tmp_path: Path
) -> None:
    """Whichever it is of those that have begun before the first gradient leaves: none is under way
    then."""
    step = Accumulating(tmp_path, seed)
    n_writes, _ = step.n_calls("pwrite")
    assert n_writes > 3
    step.first(step.model)
    expected = step.second(step.model)
    for fails_at in range(n_writes):
        before, delivered = step.first(step.planned), Event()
        late = delivered if how == "late" else None
        with (
            failing_disk("pwrite", fails_at, short=how == "short", late=late),
            on_gradients(step.planned, delivered.set),
            pytest.raises(CopyError, match=rf"written to the disk in .*\. {NO_GRADIENT} as before"),
        ):
            step.second(step.planned)
        assert_equal(before, state(step.planned))
        assert_equal(expected, step.second(step.planned))  # the micro-batch may run again


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_read_that_fails_changes_gradients_only_and_says_so(seed: int, tmp_path: Path) -> None:
    step = Accumulating(tmp_path, seed)
    step.first(step.model)
    expected = step.second(step.model)
    n_dirty = 0
    for fails_at in range(step.n_calls("preadv")[1]):
        before = step.first(step.planned)
        with failing_disk("preadv", fails_at), pytest.raises(CopyError) as raised:
            step.second(step.planned)
        after = state(step.planned)
        n = n_gradients(step.planned)
        assert_equal(before[n:], after[n:])
        is_same = all(map(torch.equal, before[:n], after[:n]))
        raised.match(f"read from the disk in .*{NO_GRADIENT if is_same else IN_PART}")
        n_dirty += not is_same
        if is_same:
            assert_equal(expected, step.second(step.planned))
    assert n_dirty > 0


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_gradients_of_a_first_micro_batch_are_taken_back(call: str, tmp_path: Path) -> None:
    """Whichever call fails: there were none before."""
    step = Accumulating(tmp_path)
    step.restore_after_error(step.model)
    expected = step.second(step.model)
    n_delivered = 0

    def count() -> None:
        nonlocal n_delivered
        n_delivered += 1

    for fails_at in range(step.n_calls(call)[1]):
        step.restore_after_error(step.planned)
        before = state(step.planned)
        with (
            on_gradients(step.planned, count),
            failing_disk(call, fails_at),
            pytest.raises(CopyError, match=f"the disk in .*{NO_GRADIENT} as before"),
        ):
            step.second(step.planned)
        assert_equal(before, state(step.planned))
    assert_equal(expected, step.second(step.planned))
    assert n_delivered > 0


@pytest.mark.slow
def test_buffers_stay_where_another_forward_pass_has_written_them(tmp_path: Path) -> None:
    step = Accumulating(tmp_path)
    step.first(step.planned)
    loss = step.planned(step.batches[1])
    with torch.no_grad():
        step.planned(step.batches[0])
    before = state(step.planned)
    with (
        failing_disk("preadv", 0),
        pytest.raises(CopyError, match=f"{NO_GRADIENT} not as before that pass: another one has"),
    ):
        loss.backward()
    assert_equal(before, state(step.planned))


@pytest.mark.slow
def test_several_passes_before_one_backward_pass(tmp_path: Path) -> None:
    """The one that fails is undone; the other has neither been undone nor added a gradient."""
    step = Accumulating(tmp_path)
    step.first(step.planned)
    first = step.planned(step.batches[1])
    before = state(step.planned)
    second = step.planned(step.batches[0])
    with failing_disk("preadv", 0), pytest.raises(CopyError, match=NO_GRADIENT):
        (first + second).backward()
    assert_equal(before, state(step.planned))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("reserves", [True, False], ids=["before the step", "in the step"])
def test_a_disk_that_is_full(
    reserves: bool, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems promise bytes that they do not have: then the error comes in the step."""
    step = Accumulating(tmp_path)
    before = step.first(step.planned)
    remove(step.planned)
    apply(step.planned, step.solution, disk_directory=small_disk)
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", lambda file, at, n: os.truncate(file, at + n))
    what = rf"No space left on device\. {NO_GRADIENT} as before"
    with pytest.raises(CopyError, match="nothing was run" if reserves else what):
        step.second(step.planned)
    assert_equal(before, state(step.planned))
