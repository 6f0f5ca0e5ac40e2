"""Exported plans of ranks: which collectives run again, and what is lost to single operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.export_loss import MODELS, sharded_step
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import is_collective, named
from graphs.trace import fake_mesh, trace
from scheduler_runtime.execute.unread_results import Unread
from scheduler_runtime.export import Export, to_torch_checkpoint
from solver.methods import find_obstacle
from solver.schedule import Request
from solver.solving import attempt
from tests.support.budgets import baseline_peak_bytes
from tests.support.grid_ranks import batch, model_of
from tests.support.tensor_ranks import Transformer, colwise, sequence


class Collectives(TorchDispatchMode):
    """Counts those that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # those that call others, and those without memory, on which nothing runs
        if any(kind in (DTensor, AsyncCollectiveTensor, Unread) for kind in types):
            return NotImplemented
        name = str(func)
        if is_collective(name) and "wait" not in name and "wrap" not in name:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def exported_at(share: float, model: torch.nn.Module, graph: Graph) -> Export:
    """The export of a plan for this share of what a plan can save."""
    least_bytes = find_obstacle(graph).reached_bytes
    budget_bytes = least_bytes + int(share * (baseline_peak_bytes(graph) - least_bytes))
    return to_torch_checkpoint(model, attempt(graph, Request(budget_bytes, time_limit_s=60)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.4])
@pytest.mark.parametrize("case", ["sequence", "colwise"])
def test_collectives_run_as_often_as_the_plan_says(case: str, share: float) -> None:
    with fake_mesh(2) as mesh:
        model = model_of(case, mesh)
        plain = Collectives()
        with plain:
            model(*batch(0)).backward()
        graph = trace(model, batch(0))
        export = exported_at(share, model, graph)
        assert {each.path for each in export.modules} >= {"blocks.0", "blocks.1"}
        planned = Collectives()
        with planned:
            model(*batch(0)).backward()
        runs = Counter(graph.node_by_name[name].op for name in export.schedule.order)
        assert planned.calls == {op: n for op, n in runs.items() if is_collective(op)}
        assert sum(plain.calls.values()) > 0


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("n_ranks", [None, 8])
@pytest.mark.parametrize("styles", [colwise, sequence])
def test_at_half_of_the_activations_little_is_lost(
    styles: Callable[[int], dict[str, Any]], n_ranks: int | None
) -> None:
    """Eight blocks, 4096 wide, in bfloat16 on one of eight tensor-parallel H100s; n_ranks: of FSDP2
    besides. Measured: 0.3 to 0.9 points."""
    with fake_mesh(8) as mesh, torch.device("meta"):
        whole = Transformer(128_256, 8, 4096, 32).to(torch.bfloat16)
        model = parallelize_module(whole, mesh, styles(8))
        tokens = torch.zeros(2, 4096, dtype=torch.long)
        costs = Roofline(named("h100"))
        graph = trace(model, (tokens, tokens), costs=costs, device="cpu", fsdp=n_ranks)
        export = exported_at(0.5, model, graph)
    assert export.fits
    assert len(export.modules) == 8
    assert export.overhead > 0
    assert export.overhead - export.planned_overhead <= 0.02


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("name", "most"), [("vit-base", 0.01), ("resnet50", 0.02)])
def test_a_rank_of_fsdp_loses_little_at_half_of_the_activations(name: str, most: float) -> None:
    """Of eight H100s. Measured: 0.82 and 1.22 points."""
    with torch.device("meta"):
        model, sample = MODELS[name]()
        export = exported_at(0.5, model, sharded_step(model, sample, 8))
    assert export.fits
    assert export.overhead > 0
    assert export.overhead - export.planned_overhead <= most
