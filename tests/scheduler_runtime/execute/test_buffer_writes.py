"""Forward passes that write into parts of a buffer, planned and not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime import FitError, apply, fit
from scheduler_runtime.measuring import measure
from solver import report, solve
from solver.schedule.recompute import baseline, keep
from tests.support.bitwise import assert_equal, assert_same_gradients, solution_of

N = 16

Read = Callable[["Queue"], torch.Tensor]
Write = Callable[["Queue", torch.Tensor], "torch.Tensor | None"]


class Queue(nn.Module):
    """Reads a buffer, and then writes keys of shape [8, N] into it.

    read: a tensor that is added to the hidden values.
    write: may return a number that is added to the loss.
    """

    def __init__(self, write: Write, read: Read | None = None, n_columns: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh())
        self.read, self.write = read, write
        self.register_buffer("queue", torch.randn(N, n_columns))
        self.register_buffer("other", torch.randn(N, n_columns))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        if self.read is not None:
            hidden = hidden * self.read(self)
        loss = (hidden @ self.queue.clone()).square().mean()
        with torch.no_grad():
            more = self.write(self, hidden)
        return loss if more is None else loss + more


def columns(model: Queue, keys: torch.Tensor) -> None:
    model.queue[:, 8:16] = keys.T


def step_of_rows(model: Queue, keys: torch.Tensor) -> None:
    model.queue[1:9:2, 3] = keys[:4, 0]


def part_of_part(model: Queue, keys: torch.Tensor) -> None:
    model.queue[2:10, 4 : 4 + N][1:3].copy_(keys[:2])


def row(model: Queue, keys: torch.Tensor) -> None:
    model.queue[3] = keys.mean()  # is broadcast
    model.counts[1] = 7
    model.other[2:4].zero_()
    model.other[6:8].fill_(2.5)


def several(model: Queue, keys: torch.Tensor) -> None:
    model.queue[:, :8] = keys.T
    model.queue[:, 4:12] = keys.T * 2  # over half of the first
    model.queue[-1, 2:4] = 1.0


def other_dtype(model: Queue, keys: torch.Tensor) -> None:
    model.queue[:, :8] = keys.T.double()
    model.counts[:2] = (keys[0, :2] * 100).int()


def added(model: Queue, keys: torch.Tensor) -> None:
    model.queue[:, 8:16].add_(keys.T)


def both(model: Queue, keys: torch.Tensor) -> None:
    model.queue[:, 8:16] = keys.T
    model.other[:, 8:16] = keys.T


IN_PLACE = [columns, step_of_rows, part_of_part, row, several, other_dtype, added, both]


def read_afterwards(model: Queue, keys: torch.Tensor) -> torch.Tensor:
    model.queue[:, 8:16] = keys.T
    return model.queue.square().sum()


def read_between(model: Queue, keys: torch.Tensor) -> torch.Tensor:
    model.queue[:, 8:16] = keys.T
    total = model.queue[:, 9].sum()
    model.queue[:, 9] = 0.0
    return total


def old_view_read_afterwards(model: Queue, keys: torch.Tensor) -> torch.Tensor:
    part = model.queue[:, 4:12]
    model.queue[:, 8:16] = keys.T
    return part.sum()


def from_itself(model: Queue, _keys: torch.Tensor) -> None:
    model.queue[:, 8:16] = model.queue[:, 16:24]


def from_another_that_changes(model: Queue, keys: torch.Tensor) -> None:
    model.other[:, :8] = model.queue[:, :8]
    model.queue[:, :8] = keys.T


def whole_and_part(model: Queue, keys: torch.Tensor) -> None:
    model.queue.mul_(0.5)
    model.queue[:, 8:16] = keys.T


COPIED = [
    read_afterwards,
    read_between,
    old_view_read_afterwards,
    from_itself,
    whole_and_part,
]


def batch() -> torch.Tensor:
    return torch.randn(8, N)


def traced(model: Queue) -> Graph:
    return trace(model, batch())


def same_training(
    plain: Queue, graph: Graph, under: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """Three steps in eager mode and with two plans: all bits of loss, gradients and buffers."""
    for schedule in (baseline(graph), keep(graph, set())):
        expected, planned = copy.deepcopy(plain), copy.deepcopy(plain)
        apply(planned, solution_of(graph, schedule))
        for seed in range(3):
            torch.manual_seed(seed)
            x, losses = batch(), []
            for model in (expected, planned):
                model.zero_grad()
                with under():
                    losses.append(model(x))
                losses[-1].backward()
            assert torch.equal(*losses)
            assert_same_gradients(expected, planned)
            assert_equal(expected.buffers(), planned.buffers())


def scatters(graph: Graph) -> list[str]:
    views = ("aten.slice.Tensor", "aten.select.int")
    return [node.op for node in graph.nodes if "_scatter" in node.op or node.op in views]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("write", IN_PLACE, ids=lambda write: write.__name__)
def test_a_part_of_a_buffer_is_written_in_place(write: Write) -> None:
    model = Queue(write)
    graph = traced(model)
    assert scatters(graph) == []
    same_training(model, graph)


@pytest.mark.slow
@pytest.mark.parametrize("write", [*COPIED, from_another_that_changes], ids=lambda w: w.__name__)
def test_what_is_read_later_is_written_into_a_copy(write: Write) -> None:
    model = Queue(write)
    graph = traced(model)
    assert scatters(graph) != []
    same_training(model, graph)


@pytest.mark.slow
def test_what_reads_the_buffer_before_the_write_is_not_recomputed() -> None:
    model = Queue(columns, read=lambda model: model.queue[:, 0].exp())
    graph = traced(model)
    assert scatters(graph) == []
    assert not any(
        node.recomputable for node in graph.nodes if graph.meta.buffers["queue"] in node.inputs
    )
    same_training(model, graph)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.slow
def test_under_autocast() -> None:
    model = Queue(columns, read=lambda model: model.queue[:, 0].exp())
    with autocast():
        graph = traced(model)
    assert scatters(graph) == []
    same_training(model, graph, under=autocast)


def test_a_plan_takes_no_more_than_the_step_without_one() -> None:
    plain = Queue(columns, n_columns=4096)
    plain_bytes = measure(copy.deepcopy(plain), batch()).peak_bytes
    planned = fit(plain, budget="100MB")
    planned(batch()).backward()
    assert measure(planned, batch()).peak_bytes <= plain_bytes


class ReadAgain(nn.Module):
    """The program of a plan has the queue twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N, N)
        self.register_buffer("queue", torch.zeros(N, 4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            self.queue[:, 8:16] = hidden.T
        return hidden.square().mean() + self.queue[0, 9]


@pytest.mark.slow
def test_a_step_that_fits_only_without_a_plan_is_told_so(capsys) -> None:
    model = ReadAgain()
    plain_bytes = solve(model, batch(), budget="1GB").baseline.peak_bytes
    solution = solve(model, batch(), budget=plain_bytes)
    assert solution.schedule is None
    report(solution)
    assert "however" in capsys.readouterr().out
    with pytest.raises(FitError, match="which fits: train without one"):
        fit(model, budget=2 * 4 * N * 4096 - 1, loss_reserve=0)(batch())
    assert not solve(ReadAgain(), batch(), budget=plain_bytes // 2).fits_without_plan
