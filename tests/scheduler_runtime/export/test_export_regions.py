"""Checkpointed modules inside one another, in any choice, run as they are simulated."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime.execute.unread_results import Unread
from scheduler_runtime.export import module_tree, to_torch_checkpoint
from scheduler_runtime.export.selective_calls import may_save
from scheduler_runtime.measuring import measure
from solver.module_checkpointing.regions import CheckpointRegion, RegionError, dropped_by, nodes_of
from solver.schedule.ops import Compute
from tests.scheduler_runtime.export.test_export import (
    CASES,
    Towers,
    graph_of,
    planned,
    put,
    small_gpt2,
    tokens,
)
from tests.support.bitwise import assert_equal, one_step


class _Count(TorchDispatchMode):
    """How often each operator is called, backward ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += Unread not in types  # else it hands on what it was given
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(6))
def test_eager_mode_runs_the_operators_of_the_simulated_schedule(seed: int) -> None:
    """So what is simulated is what runs: the early stop, what is saved, what nests."""
    model, batch = small_gpt2(dropout=0.0), tokens()
    graph = trace(model, batch)
    regions = regions_by_chance(graph, model, random.Random(seed))
    schedule = put(model, graph, regions).schedule
    planned_calls = Counter(
        graph.node_by_name[op.node].op for op in schedule.ops if isinstance(op, Compute)
    )
    with _Count() as count:
        model(*batch).backward()
    assert planned_calls.total() >= len(graph.nodes)
    for operator, n_calls in planned_calls.items():
        assert count.calls[operator] == n_calls, operator


def regions_by_chance(
    graph: Graph, model: nn.Module, choice: random.Random
) -> list[CheckpointRegion]:
    """Blocks and parts of them, whole or with some of what they make saved, some nested."""
    tree = module_tree(model, graph)
    possible = may_save(graph)

    def whole(path: str) -> CheckpointRegion | None:
        try:
            region = CheckpointRegion(nodes_of(graph, path), modules=(path,))
            return region if dropped_by(graph, region) else None
        except RegionError:
            return None

    def regions(path: str, depth: int) -> Iterator[CheckpointRegion]:
        region = whole(path)
        kind = choice.choice(["leave", "whole", "save", "save", "parts", "nest"])
        if kind in ("parts", "nest") and depth:
            parts = [r for part in tree.parts.get(path, ()) for r in regions(part, depth - 1)]
            if kind == "parts" or region is None:
                yield from parts
            else:
                yield dataclasses.replace(region, inner=tuple(parts))
        elif region and kind == "save":
            made = region.nodes  # needed by the backward pass or not
            saved = frozenset(choice.sample(made, choice.randint(0, len(made))))
            saved = possible(dataclasses.replace(region, saved=saved))
            yield dataclasses.replace(region, saved=saved)
        elif region and kind != "leave":
            yield region

    return [region for block in tree.blocks for region in regions(block, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_any_choice_of_regions_is_bitwise_identical_within_the_simulated_peak(
    name: str, seed: int
) -> None:
    make, batch_of = CASES[name]
    plain, batch, graph = make(), batch_of(), graph_of(name)
    model = copy.deepcopy(plain)
    regions = regions_by_chance(graph, model, random.Random(seed))
    simulated_bytes = put(model, graph, regions).peak_bytes
    torch.manual_seed(0)
    measured = measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes
    assert measured <= simulated_bytes
    assert_equal(one_step(plain, batch, 3), one_step(model, batch, 3))


@pytest.mark.slow
def test_modules_around_the_blocks_nest() -> None:
    torch.manual_seed(0)
    plain, batch = Towers(), torch.randn(512, 32)
    model = copy.deepcopy(plain)
    plan = to_torch_checkpoint(model, planned(trace(model, batch), 0.1), on_excess="least")
    inner = [module for module in plan.modules if module.inside]
    assert {module.inside for module in inner} == {("low",), ("middle",), ("high",)}
    assert measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes <= plan.peak_bytes
    assert_equal(one_step(plain, batch, 3), one_step(model, batch, 3))
    for module in plan.modules:
        assert model.get_submodule(module.path).forward.n_runs == 1 + module.n_recomputations
