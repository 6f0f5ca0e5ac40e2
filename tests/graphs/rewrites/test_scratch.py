"""Writes into parts of tensors that the step makes: no copies of the whole, every bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.same_bits import keeping_nothing, solution_of
from graphs.graph import Graph, as_eager
from graphs.trace import trace
from scheduler_runtime import apply
from solver.schedule import baseline, simulate
from tests.support.bitwise import assert_same_gradients

IN_PLACE = ("in_place",)
ROWS, SCRATCH_BYTES = 64, 64 * 2048 * 4


class _LogSumExp(torch.autograd.Function):
    """Of a product, one chunk of classes after the other, each in the same scratch memory."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scratch, total = torch.empty(ROWS, 2048), torch.zeros(ROWS)
        for start in range(0, len(weight), 16):
            chunk = torch.mm(hidden, weight[start : start + 16].t(), out=scratch[:, :16])
            total += chunk.exp().sum(1)
        ctx.save_for_backward(hidden, weight, total)
        return total.log()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, total = ctx.saved_tensors
        scratch, of_hidden = torch.empty(ROWS, 2048), torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight)
        for start in range(0, len(weight), 16):
            rows = weight[start : start + 16]
            chunk = torch.mm(hidden, rows.t(), out=scratch[:, :16])
            chunk.copy_(chunk.exp() * (gradients[0] / total).unsqueeze(1))
            of_hidden += chunk @ rows
            of_weight[start : start + 16] += chunk.t() @ hidden
        return of_hidden, of_weight


class LossInChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Parameter(torch.randn(32, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _LogSumExp.apply(torch.tanh(self.layer(x)), self.head)
        return made.mean()


def activation_bytes(graph: Graph) -> int:
    return simulate(graph, baseline(graph)).peak_bytes - graph.resident_bytes


def test_scratch_memory_is_allocated_once() -> None:
    model, x = LossInChunks(), torch.randn(ROWS, 8)
    plain, graph = (trace(model, x, rewrites=rewrites) for rewrites in ((), IN_PLACE))
    assert activation_bytes(plain) > 2 * SCRATCH_BYTES
    assert SCRATCH_BYTES < activation_bytes(graph) < 1.1 * SCRATCH_BYTES
    assert SCRATCH_BYTES < activation_bytes(as_eager(plain)) < 1.1 * SCRATCH_BYTES
    ops = [node.op for node in graph.nodes]
    assert "aten.copy.default" not in ops
    # two writes in the forward pass; in backward, per chunk: product, its gradient, of_weight
    assert ops.count("aten.slice_scatter.default") == 2 + 2 * 3


def test_every_bit_is_kept() -> None:
    torch.manual_seed(0)
    model, x = LossInChunks(), torch.randn(ROWS, 8)
    plain, graph = copy.deepcopy(model), trace(model, x, rewrites=IN_PLACE)
    apply(model, solution_of(graph, baseline(graph)))
    for _ in range(2):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            losses.append(each(x))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert_same_gradients(plain, model)


class SumsOfParts(nn.Module):
    """Reads a part after it has been updated in place, and writes over it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x))
        with torch.no_grad():
            scratch, total = torch.empty(ROWS, 2048), torch.zeros(ROWS)
            for _ in range(3):
                scratch[:, :16] = hidden.repeat(1, 2) + total.unsqueeze(1)
                scratch[:, :8] *= 2
                total += scratch[:, :8].sum(1)
        return (hidden * total.unsqueeze(1)).square().mean()


def test_what_reads_a_part_that_is_written_again_runs_once() -> None:
    torch.manual_seed(0)
    model, x = SumsOfParts(), torch.randn(ROWS, 8)
    plain, graph = copy.deepcopy(model), trace(model, x, rewrites=IN_PLACE)
    assert sum(node.overwrites is not None for node in graph.forward_nodes) == 6
    assert "aten.slice.Tensor" not in {node.op for node in graph.nodes}  # it allocates nothing
    apply(model, keeping_nothing(graph))
    for each in (plain, model):
        each(x).backward()
    assert_same_gradients(plain, model)


class Padded(nn.Module):
    """Writes a part once, of a tensor that the frozen layer after it does not need in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(len(x), 16)
        padded[:, 8:] = self.first(x)
        return torch.tanh(self.second(padded)).sum()


class Diagonal(nn.Module):
    """`forward` itself calls a scatter, which is a copy in eager mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diagonal_scatter(torch.exp(x @ self.w), x.sum(0)).sum()


def test_what_leads_to_saved_tensors_stays_recomputable() -> None:
    graph = trace(Padded(), torch.randn(64, 8), rewrites=IN_PLACE)
    recomputable = {node.op for node in graph.forward_nodes if node.recomputable}
    assert {"aten.slice_scatter.default", "aten.addmm.default", "aten.tanh.default"} <= recomputable


@pytest.mark.parametrize(
    ("model", "width", "copies"), [(Padded(), 8, False), (Diagonal(), 16, True)]
)
def test_eager_mode_copies_only_for_scatters_that_forward_calls(
    model: nn.Module, width: int, copies: bool
) -> None:
    graph = trace(model, torch.randn(16, width))
    (scatter,) = (node for node in graph.forward_nodes if "scatter" in node.op)
    (made,) = scatter.outputs
    assert (as_eager(graph).root(made) == made) is copies
