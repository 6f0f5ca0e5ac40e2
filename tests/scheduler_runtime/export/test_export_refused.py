"""What `to_torch_checkpoint` refuses, and what is refused of a model with an exported plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from scheduler_runtime.execute.torch_checkpoint import CountMismatchError
from scheduler_runtime.export import (
    ExportError,
    remove_torch_checkpoint,
    to_torch_checkpoint,
)
from solver.module_checkpointing.regions import CheckpointRegion, nodes_of
from solver.schedule.recompute import baseline
from tests.scheduler_runtime.export.test_export import put, small_gpt2, solution_within, tokens
from tests.support.bitwise import solution_of
from tests.support.models import NormAndDropout


class Branching(nn.Module):
    """Runs one operator more when its flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Branch() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return self.second(torch.tanh(self.first(y))) if self.twice else y


def test_another_program_than_the_planned_one_is_an_error() -> None:
    model, batch = Branching(), torch.randn(64, 16)
    graph = trace(model, batch)
    path = "blocks.1"
    nodes = nodes_of(graph, path)
    put(model, graph, [CheckpointRegion(nodes, modules=(path,), saved=frozenset(nodes[:1]))])
    model(batch).backward()
    model.blocks[1].twice = True
    with pytest.raises(CountMismatchError, match=r"blocks\.1 called aten\.addmm\.default 4 times"):
        model(batch)


def test_what_cannot_be_exported_is_refused_by_name() -> None:
    model, solution = small_gpt2(), solution_within("gpt2", 0.35)
    with pytest.raises(ExportError, match="its status is infeasible"):
        to_torch_checkpoint(
            model,
            dataclasses.replace(solution, schedule=None, simulation=None, status="infeasible"),
        )
    with pytest.raises(ExportError, match=r"differs from this GPT2 in 'blocks\.3"):
        to_torch_checkpoint(small_gpt2(n_layers=4), solution)
    with pytest.raises(ExportError, match="differs from this NormAndDropout"):
        to_torch_checkpoint(NormAndDropout(), solution)
    with pytest.raises(ValueError, match="on_excess is 'warn'"):
        to_torch_checkpoint(model, solution, on_excess="warn")
    bare = dataclasses.replace(solution, graph=dataclasses.replace(solution.graph, meta={}))
    with pytest.raises(ExportError, match="a graph file that no module was traced into"):
        to_torch_checkpoint(model, bare)
    to_torch_checkpoint(model, solution)
    with pytest.raises(ExportError, match="exported to this model already"):
        to_torch_checkpoint(model, solution)
    remove_torch_checkpoint(model)
    with pytest.raises(ExportError, match="applied to this model already"):
        to_torch_checkpoint(apply(model, solution), solution)


@pytest.mark.slow
def test_an_exported_model_is_not_traced_and_removing_twice_does_nothing() -> None:
    model, solution = small_gpt2(), solution_within("gpt2", 0.35)
    found = to_torch_checkpoint(model, solution)
    with pytest.raises(TraceError, match=r"GPT2 .* an exported plan .* exported\.remove\(\)"):
        trace(model, tokens())
    found.remove()
    found.remove()
    assert trace(model, tokens()).graph_id == solution.graph.graph_id
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    apply_to = trace(part[1], torch.ones(2, 4), loss=lambda output, _: output.mean())
    apply(part[1], solution_of(apply_to, baseline(apply_to)))
    with pytest.raises(TraceError, match=r"its submodule 1 has a plan already"):
        trace(part, torch.ones(2, 4), loss=lambda output, _: output.mean())


def test_swapped_arguments_are_told() -> None:
    model, solution = small_gpt2(), solution_within("gpt2", 0.35)
    words = r"the plan first and the GPT2 second; .* to_torch_checkpoint\(model, solution\)"
    with pytest.raises(TypeError, match=words):
        to_torch_checkpoint(solution, model)
    for wrong in (None, model, "schedule.json"):
        with pytest.raises(TypeError, match=r"to_torch_checkpoint\(\) was given"):
            to_torch_checkpoint(model, wrong)
