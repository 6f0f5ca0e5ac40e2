"""Copies wait for what they copy, and lie side by side on the host."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from graphs.trace import trace
from scheduler_runtime import apply
from scheduler_runtime.execute import copies as copies_module
from scheduler_runtime.execute.copy_streams import CopyEvent, CudaCopyStreams
from solver import solve
from solver.schedule import Place, Places, Schedule, baseline, copy_layout, keep, simulate
from tests.scheduler_runtime.execute.test_copies import (
    LINK,
    PLACES,
    Tower,
    all_away,
    by_disk,
    solution_of,
)
from tests.support.bitwise import assert_bitwise_identical
from tests.support.small_graphs import make as make_graph
from tests.support.small_graphs import op, plan


class Late:
    """Copies that are made as late as the waits allow: at the first of them, or at the end."""

    def __init__(self) -> None:
        self.n_begun = self.n_settled = 0
        self._open: list[Late.Copy] = []

    class Copy:
        def __init__(
            self, target: torch.Tensor, source: torch.Tensor, before: tuple[CopyEvent, ...]
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

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[CopyEvent]
    ) -> CopyEvent:
        self._open.append(Late.Copy(target, source, tuple(after)))
        return self._open[-1]

    to_device = to_host

    def begin(self) -> None:
        self.n_begun += 1

    def settle(self) -> None:
        self.n_settled += 1
        for done in self._open:
            done.hold_host()
        self._open.clear()


@pytest.mark.slow
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
    assert_bitwise_identical(model, planned, batch)
    assert late[0].n_begun == late[0].n_settled == 3  # steps


@pytest.mark.slow
def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(copies_module, "streams_for", lambda _: Late())
    monkeypatch.setattr(copies_module.Copies, "arrive", lambda _self, _storage: None)
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    planned = apply(copy.deepcopy(model), solution_of(graph, all_away(graph, baseline(graph))))
    with pytest.raises(AssertionError):
        assert_bitwise_identical(model, planned, batch)


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
    streams = CudaCopyStreams(cuda)
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
            assert stream.waits_for == [streams._to_host, streams._to_device]


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
