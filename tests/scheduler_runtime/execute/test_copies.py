"""Plans that copy to host and disk: the same bits, the planned bytes, clear errors."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.execute import copies as copies_module
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.copy_streams import Done, OnCuda
from scheduler_runtime.execute.cuda_graph import CudaGraphError, check_program
from scheduler_runtime.execute.restart_step import step_device
from scheduler_runtime.execute.spill_file import CopyError
from scheduler_runtime.measuring import measure
from solver import solve
from solver.schedule import (
    CopyLayout,
    Drop,
    Link,
    Place,
    Places,
    Schedule,
    Solution,
    Store,
    baseline,
    copy_layout,
    keep,
    simulate,
)
from solver.schedule.simulator import IllegalScheduleError
from tests.support import same_bits
from tests.support.builders import make as make_graph
from tests.support.builders import op, plan
from tests.support.copying import away, gaps, random_copies
from tests.support.example_models import small
from tests.support.paths import ROOT
from tests.support.pools import made_pools
from tests.support.same_bits import LARGE, MODELS, assert_same_bits, one_step

__all__ = ["made_pools"]

LINK = Link(5e10, 5e10)
PLACES = Places(host=Place(LARGE, LINK), disk=Place(LARGE, LINK))
solution_of = partial(same_bits.solution_of, places=PLACES)


class Tower(nn.Module):
    """Blocks with dropout and batch norm."""

    def __init__(self, n_blocks: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(n_blocks))
        self.norm = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(n_blocks))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
            x = x + functional.dropout(down(functional.gelu(norm(up(x)))), 0.2)
        return x.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))


def all_away(graph: Graph, schedule: Schedule) -> Schedule:
    """Whatever lies idle for long is on the host meanwhile."""
    chosen = [gap for gap in gaps(graph, schedule) if gap.stop - gap.start > 6]
    return away(graph, schedule, chosen)


def by_disk(graph: Graph, schedule: Schedule, seed: int = 0) -> Schedule:
    """Random copies, some by way of the disk."""
    rng = random.Random(seed)
    while True:
        found = random_copies(graph, schedule, rng)
        words = {word for word, _ in found.ops_to_json()}
        try:
            simulate(graph, found, places=PLACES)
        except IllegalScheduleError:
            continue
        if {"spill", "load"} <= words:
            return found


def layout_of(model: nn.Module) -> CopyLayout:
    ((_, bound),) = model.forward._programs.programs  # type: ignore[union-attr]
    layout: CopyLayout = bound.program.copy_layout
    return layout


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("make", [Tower, *MODELS])
@pytest.mark.parametrize("seed", range(3))
def test_random_copies_give_the_same_bits(make: Any, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch, loss = make(), make.batch(), getattr(make, "loss", None)
    graph = trace(model, batch, loss=loss)
    kept = {t.name for t in graph.tensors if random.Random(f"{seed} {t.name}").random() < 0.6}
    schedule = by_disk(graph, keep(graph, kept), seed)
    planned = copy.deepcopy(model)
    apply(planned, solution_of(graph, schedule), disk_directory=tmp_path)
    assert_same_bits(model, planned, batch, loss)
    assert not list(tmp_path.iterdir())


def with_copies(model: nn.Module, batch: Any, *, share: float = 0.75) -> Solution:
    """A solved plan, with rewrites, whose idle storages are on the host."""
    solution = solve(model, batch, budget="100GB", time_limit_s=600)
    resident_bytes, peak_bytes = solution.graph.resident_bytes, solution.baseline.peak_bytes
    budget_bytes = int(resident_bytes + share * (peak_bytes - resident_bytes))
    solution = solve(model, batch, budget=budget_bytes, time_limit_s=600)
    assert solution.schedule is not None
    return solution_of(solution.graph, all_away(solution.graph, solution.schedule))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet50", "unet"])
def test_examples_keep_their_bits_and_the_planned_bytes(name: str) -> None:
    model, batch = small(name)
    solution = with_copies(model, batch)
    assert solution.simulation is not None
    planned = apply(copy.deepcopy(model), solution)
    assert_same_bits(model, planned, batch)
    planned.zero_grad()
    gc.collect()
    measured_bytes = measure(planned, batch).peak_bytes
    predicted_bytes = solution.simulation.peak_bytes
    assert measured_bytes <= predicted_bytes
    if name in ("resnet50", "unet"):  # as exact as without copies
        assert measured_bytes == predicted_bytes
    assert measured_bytes > 0.95 * predicted_bytes
    host_bytes = solution.simulation.host_peak_bytes
    assert host_bytes <= layout_of(planned).host_bytes <= 1.03 * host_bytes


def test_a_solved_plan_with_copies_runs() -> None:
    torch.manual_seed(0)
    model, batch = Tower(3), Tower.batch()
    plain = solve(model, batch, budget="1GB", time_limit_s=600)
    budget_bytes = (plain.graph.resident_bytes + plain.baseline.peak_bytes) // 2
    solution = solve(
        model,
        batch,
        budget=budget_bytes,
        host_budget="1GB",
        time_limit_s=600,
    )
    assert solution.schedule is not None
    assert solution.schedule.has_copies
    planned = apply(copy.deepcopy(model), solution)
    assert_same_bits(model, planned, batch)
    planned.zero_grad()
    gc.collect()
    assert measure(planned, batch).peak_bytes <= budget_bytes


def test_what_is_away_takes_no_device_memory(made_pools: list[copies_module.Pool]) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    solution = solution_of(graph, all_away(graph, baseline(graph)))
    assert solution.simulation is not None
    assert solution.simulation.peak_bytes < 0.8 * solution.baseline.peak_bytes
    planned = apply(copy.deepcopy(model), solution)
    one_step(planned, batch, 0)
    planned.zero_grad()
    gc.collect()
    share = measure(planned, batch).peak_bytes / solution.simulation.peak_bytes
    assert 0.95 < share <= 1.0
    assert len(made_pools) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_low_precision_gives_the_same_bits(dtype: torch.dtype | None) -> None:
    """dtype: of the autocast region (None: the model's own parameters are bfloat16)."""
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    if dtype is None:
        model, batch = model.to(torch.bfloat16), batch.to(torch.bfloat16)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        graph = trace(model, batch)
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, keep(graph, ()))))
    results = []
    for each in (model, planned):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = each(batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters()), *each.buffers()])
    assert all(map(torch.equal, *results))


class Norms(nn.Module):
    """Layers, each with another norm; their statistics are large beside their values."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(16, 32), nn.BatchNorm1d(32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix, norm in zip(self.mix, [*self.norm, nn.Identity()], strict=True):
            x = norm(mix(x))
        return x.float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_under_autocast_are_as_large_as_planned(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is larger has no room in the pool: its copy takes memory of its own, beside the plan."""
    torch.manual_seed(0)
    model, batch = Norms(), torch.randn(64, 32, 4)
    with torch.autocast("cpu", dtype):
        graph = trace(model, batch)
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, baseline(graph))))
    stored: list[tuple[str, int, int]] = []
    store = copies_module.Copies.store

    def noted(self: Any, storage: str, start: int, stop: int, *tensors: torch.Tensor) -> None:
        stored.append((storage, stop - start, tensors[0].untyped_storage().nbytes()))
        store(self, storage, start, stop, *tensors)

    monkeypatch.setattr(copies_module.Copies, "store", noted)
    with torch.autocast("cpu", dtype):
        loss = planned(batch)
    loss.backward()
    norms = {storage.split(".")[0] for storage, _, _ in stored if "_norm" in storage}
    assert len([name for name in norms if "backward" not in name]) == len(model.norm)
    assert [made for _, _, made in stored] == [expected for _, expected, _ in stored]


def test_accumulated_gradients_and_several_passes(made_pools: list[copies_module.Pool]) -> None:
    """Each pass before a backward pass has a pool of its own; they are used again."""
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch, gradients="accumulate")
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, keep(graph, ()))))
    results = []
    for each in (model, planned):
        torch.manual_seed(1)
        for _ in range(2):
            torch.stack([each(batch + i) for i in range(3)]).sum().backward()
        results.append([*(p.grad for p in each.parameters()), *each.buffers()])
    assert all(map(torch.equal, *results))
    assert len(made_pools) == 3


def test_a_pass_without_backward_gives_back_its_memory(
    made_pools: list[copies_module.Pool],
) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, baseline(graph))))
    state = copy.deepcopy(planned.state_dict())
    for _ in range(3):
        loss = planned(batch)
        del loss
        gc.collect()
    assert len(made_pools) == 1
    planned.load_state_dict(state)  # the running statistics
    assert_same_bits(model, planned, batch)


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    solution = solve(model, batch, budget="1GB", time_limit_s=600)
    assert solution.schedule is not None
    schedule = by_disk(solution.graph, solution.schedule)
    path = tmp_path / "schedule.json"
    solution_of(solution.graph, schedule).save(path)
    planned = apply(copy.deepcopy(model), path, disk_directory=tmp_path)
    assert_same_bits(model, planned, batch)


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
    assert solution.simulation is not None
    assert solution.simulation.n_recomputed == 0
    assert solution.simulation.disk_peak_bytes > 0
    assert_same_bits(model, apply(copy.deepcopy(model), solution), batch)
    assert sum(written) >= solution.simulation.disk_peak_bytes
    assert not list(tmp_path.iterdir())


def test_the_directory_of_a_plan_may_be_gone_or_another(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    model, batch, solution = planned_for_disk(tmp_path / "first")
    solution.save(tmp_path / "schedule.json")
    (tmp_path / "first").rmdir()
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json")
    with pytest.raises(CopyError, match=r"first', and the disk refuses them: No such file"):
        planned(batch)
    planned = apply(copy.deepcopy(model), tmp_path / "schedule.json", disk_directory=tmp_path)
    assert_same_bits(model, planned, batch)


class Late:
    """Copies that are made as late as the waits allow: at the first of them, or at the end."""

    def __init__(self) -> None:
        self.n_begun = self.n_settled = 0
        self._open: list[Late.Copy] = []

    class Copy:
        def __init__(
            self, target: torch.Tensor, source: torch.Tensor, before: tuple[Done, ...]
        ) -> None:
            self.todo: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
            self.before = before
            self.lock = threading.Lock()  # threads of the disk wait as well

        def hold_host(self) -> None:
            with self.lock:
                for done in self.before:
                    done.hold_host()
                self.before = ()
                if self.todo is not None:
                    (target, source), self.todo = self.todo, None
                    target.copy_(source)

        hold_compute = hold_host

    def out(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Done]) -> Done:
        self._open.append(Late.Copy(target, source, tuple(after)))
        return self._open[-1]

    back = out

    def begin(self) -> None:
        self.n_begun += 1

    def settle(self) -> None:
        self.n_settled += 1
        for done in self._open:
            done.hold_host()
        self._open.clear()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(12))
def test_every_wait_is_there(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies as late as can be, whoever does not wait reads something else."""
    late: list[Late] = []
    monkeypatch.setattr(copies_module, "streams_for", lambda _: late.append(Late()) or late[-1])
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    solution = solve(model, batch, budget="1GB", time_limit_s=600)
    graph = solution.graph
    kept = {t.name for t in graph.tensors if random.Random(f"{seed} {t.name}").random() < 0.7}
    schedule = by_disk(graph, keep(graph, kept), seed)
    planned = apply(copy.deepcopy(model), solution_of(graph, schedule), disk_directory=tmp_path)
    assert_same_bits(model, planned, batch)
    assert late[0].n_begun == late[0].n_settled == 3  # steps


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(copies_module, "streams_for", lambda _: Late())
    monkeypatch.setattr(copies_module.Copies, "arrive", lambda _self, _storage: None)
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, baseline(graph))))
    with pytest.raises(AssertionError):
        assert_same_bits(model, planned, batch)


class FakeStream:
    """A CUDA stream that knows only what it waits for."""

    def __init__(self, _device: torch.device | None = None) -> None:
        self.waits_for: list[FakeStream] = []

    def wait_stream(self, stream: FakeStream) -> None:
        self.waits_for.append(stream)


def test_the_stream_of_an_abandoned_step_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's memory goes back to the stream that forward ran on, wherever the loss is lost."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    cuda = torch.device("cuda")
    streams = OnCuda(cuda)
    pool = copies_module.Pool(cuda, torch.empty(0, dtype=torch.uint8), None, streams)
    monkeypatch.setattr(copies_module.Pool, "of", lambda *_: pool)
    graph = make_graph([op("f", "", "x"), op("b", "x", "g", phase="backward")], {"x": 4, "g": 4})
    pools, layout = copies_module.Pools(), copy_layout(graph, plan(graph, "f b"), None)
    for _ in range(2):  # the second step has the streams of the first
        forward_stream = current = FakeStream()
        step_copies = pools.open(layout, cuda)
        current = FakeStream()
        step_copies.close()
        for stream in (forward_stream, current):
            assert stream.waits_for == [streams._out, streams._back]


def test_a_scalar_on_the_cpu_does_not_move_a_step_on_a_card() -> None:
    """The meta device stands for the card."""
    scalar, weight = torch.ones(()), torch.ones(2, device="meta")
    assert step_device([scalar, weight]).type == "meta"
    assert step_device([scalar]).type == "cpu"
    assert step_device([]).type == "cpu"


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
    assert all(map(torch.equal, model.buffers(), planned.buffers()))
    assert_same_bits(model, planned, batch)  # once there is room
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
@pytest.mark.parametrize("how", ["error", "short"])
def test_a_disk_that_fails_in_the_step(
    call: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, planned, batch, solution = spilling(tmp_path)
    apply(planned, solution, disk_directory=tmp_path)
    state = copy.deepcopy(planned.state_dict())

    def fails(*_: Any) -> int:
        if how == "short":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(CopyError, match=r"a copy of a tensor could not be .* the disk in '"):
            one_step(planned, batch, 0)
    for name, parameter in planned.named_parameters():
        assert torch.equal(parameter, state[name])
    planned.load_state_dict(state)  # the running statistics
    planned.zero_grad()
    gc.collect()
    assert_same_bits(model, planned, batch)


PROCESS = """
import os, signal, sys
from pathlib import Path
import torch
from scheduler_runtime import apply
from tests.scheduler_runtime.execute.test_copies import Tower, spilling
from tests.support.same_bits import one_step
directory, seed, killed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "killed"
model, planned, batch, solution = spilling(directory)
apply(planned, solution, disk_directory=directory)
if killed:
    loss = planned(batch)
    print(len(os.listdir(directory)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
plain, found = one_step(model, batch + seed, seed), one_step(planned, batch + seed, seed)
assert all(map(torch.equal, plain, found))
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


def test_what_leaves_the_step_is_not_copied() -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    loss = graph.returned[0]
    schedule = baseline(graph)
    edited = replace(schedule, ops=(*schedule.ops, Store(loss), Drop(loss)))
    planned = apply(model, replace(solution_of(graph, schedule), schedule=edited))
    with pytest.raises(IllegalScheduleError, match="which leaves the step"):
        planned(batch)


def test_a_recorded_step_cannot_copy() -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    planned = apply(model, solution_of(graph, all_away(graph, baseline(graph))))
    planned(batch)
    ((_, bound),) = planned.forward._programs.programs  # type: ignore[union-attr]
    assert isinstance(bound, BoundProgram)
    with pytest.raises(CudaGraphError, match="copies tensors to host memory"):
        check_program(bound)


def stays_of(schedule: Schedule) -> list[tuple[str, int, int]]:
    """(storage, start, stop) of each copy on the host."""
    found, open_ = [], {}
    for position, (word, name) in enumerate(schedule.ops_to_json()):
        if word in ("store", "load"):
            open_[name] = position
        elif word == "drop":
            found.append((name, open_.pop(name), position))
    return found + [(name, start, len(schedule.ops)) for name, start in open_.items()]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(10))
def test_copies_lie_side_by_side(seed: int) -> None:
    torch.manual_seed(0)
    graph = trace(Tower(), Tower.batch())
    schedule = by_disk(graph, keep(graph, ()), seed)
    found = simulate(graph, schedule, places=PLACES)
    layout = copy_layout(graph, schedule, PLACES)
    assert found.host_peak_bytes <= layout.host_bytes <= 1.2 * found.host_peak_bytes + 512
    assert found.disk_peak_bytes <= layout.disk_bytes
    stays = stays_of(schedule)
    for i, (name, start, stop) in enumerate(stays):
        size_bytes = graph.tensor_by_name[name].size_bytes
        at = layout.address[start]
        assert at + size_bytes <= layout.host_bytes
        for other, start_2, stop_2 in stays[:i]:
            if start < stop_2 and start_2 < stop:
                at_2, size_2 = layout.address[start_2], graph.tensor_by_name[other].size_bytes
                assert at + size_bytes <= at_2 or at_2 + size_2 <= at


def test_copies_that_do_not_fit_side_by_side() -> None:
    """3 + 4 bytes at most at once; b comes between a and c, so 2 + 3 + 4 are needed."""
    sizes = {"x": 1, "a": 2, "b": 3, "c": 4, "d": 0}
    nodes = [op(f"make_{name}", "x", name) for name in "abc"]
    nodes.append(op("q", "a b c", "d", phase="backward"))
    graph = make_graph(nodes, sizes, outputs="d")
    schedule = plan(graph, "make_a store:a make_b store:b make_c drop:a store:c q")
    assert simulate(graph, schedule, places=PLACES).host_peak_bytes == 7
    fits = Places(host=Place(7, LINK))
    assert copy_layout(graph, schedule, fits).host_bytes == 7
    less = Places(host=Place(6, LINK))
    assert "the copies on the host, side by side, take 7 B" in copy_layout(
        graph, schedule, less
    ).excess(less)
    assert not copy_layout(graph, schedule, fits).excess(fits)
