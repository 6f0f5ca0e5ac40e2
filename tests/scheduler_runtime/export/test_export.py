"""Plans exported as stock checkpoints: simulated as they run, bitwise identical, removable."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from examples import gpt2, resnet50
from graphs.costs.models import Measured
from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime import remove
from scheduler_runtime.execute.torch_checkpoint import CheckpointedForward
from scheduler_runtime.export import (
    Export,
    ExportError,
    remove_torch_checkpoint,
    to_torch_checkpoint,
)
from scheduler_runtime.export.selective_calls import extra_bytes, may_save
from scheduler_runtime.export.stock_checkpoints import _install
from scheduler_runtime.measuring import measure
from solver import solve
from solver.methods.least_budget import find_obstacle
from solver.module_checkpointing.region_plan import plan_regions
from solver.module_checkpointing.regions import CheckpointRegion, nodes_of
from solver.schedule.recompute import baseline, keep
from solver.schedule.simulator import simulate
from solver.schedule.solution import Solution
from tests.support.bitwise import assert_bitwise_identical, assert_equal, one_step, solution_of
from tests.support.models import ConvNet


def small_gpt2(dropout: float = 0.1, n_layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return gpt2.get_model(
        n_layers=n_layers, width=32, n_heads=2, n_tokens=64, max_length=32, dropout=dropout
    )


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return gpt2.get_batch(batch_size=4, seq_length=32, n_tokens=64)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(16)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def small_resnet() -> nn.Module:
    """Batch norm whose result is overwritten, in blocks with shortcuts."""
    torch.manual_seed(0)
    return resnet50.get_model(depths=(2, 1), width=8, n_classes=10)


def labelled_images() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return resnet50.get_batch(batch_size=4, image_size=32, n_classes=10)


CASES: dict[str, tuple[Any, Any]] = {
    "gpt2": (small_gpt2, tokens),
    "conv": (conv_net, images),
    "resnet": (small_resnet, labelled_images),
}


@functools.cache
def graph_of(name: str) -> Graph:
    """Measured: what convolutions take inside is an estimate of the roofline."""
    make, batch_of = CASES[name]
    return trace(make(), batch_of(), costs=Measured(torch.device("cpu")))


@functools.cache
def solution_within(name: str, share: float) -> Solution:
    return planned(graph_of(name), share)


def planned(graph: Graph, share: float) -> Solution:
    """Within this share of the way from the least budget to the peak of the plain step.

    Keeps as many of the last forward tensors as fit: no search, so no clock decides.
    """
    plain = simulate(graph, baseline(graph))
    least = find_obstacle(graph)
    budget_bytes = int(least.reached_bytes + share * (plain.peak_bytes - least.reached_bytes))
    made = [name for node in graph.forward_nodes for name in node.outputs]
    choices = (keep(graph, set(made[first:])) for first in range(0, len(made), 2))
    fitting = (each for each in choices if simulate(graph, each).peak_bytes <= budget_bytes)
    return solution_of(graph, next(fitting, least.schedule), budget_bytes=budget_bytes)


def exported(name: str, share: float) -> tuple[nn.Module, nn.Module, Any, Export]:
    make, batch_of = CASES[name]
    plain = make()
    model = copy.deepcopy(plain)
    return plain, model, batch_of(), to_torch_checkpoint(model, solution_within(name, share))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("gpt2", 0.35), ("conv", 0.7), ("gpt2", 0.8), ("resnet", 0.5)]
)
def test_the_step_fits_as_simulated_and_is_bitwise_identical(name: str, share: float) -> None:
    plain, model, batch, plan = exported(name, share)
    assert plan.modules
    assert plan.fits
    assert simulate(graph_of(name), plan.schedule).time_s == plan.time_s
    peaks = [measure(copy.deepcopy(m), batch, n_steps=1).peak_bytes for m in (plain, model)]
    assert peaks[1] <= plan.peak_bytes < peaks[0]
    assert_bitwise_identical(plain, model, batch)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_half_of_the_activations_costs_little_more_than_the_plan_itself(dropout: float) -> None:
    torch.manual_seed(0)
    plain = gpt2.get_model(
        n_layers=8, width=64, n_heads=4, n_tokens=64, max_length=64, dropout=dropout
    )
    batch = gpt2.get_batch(batch_size=4, seq_length=64, n_tokens=64)
    model = copy.deepcopy(plain)
    step = solve(model, batch, budget="1GB", rewrites="none")
    half = (step.baseline.peak_bytes + step.graph.resident_bytes) // 2
    plan = to_torch_checkpoint(model, solve(model, batch, budget=half, rewrites="none"))
    assert plan.overhead - plan.planned_overhead <= 0.03
    assert plan.peak_bytes <= half
    assert_bitwise_identical(plain, model, batch)
    assert measure(model, batch, n_steps=1).peak_bytes <= plan.peak_bytes


@pytest.mark.slow
def test_dropout_draws_again_without_what_it_is_applied_to() -> None:
    """So the last product of a block neither runs again nor stays, and nor does its noise."""
    plain, batch = small_gpt2(), tokens()
    model = copy.deepcopy(plain)
    graph = trace(model, batch)
    region = CheckpointRegion(nodes_of(graph, "blocks.1"), modules=("blocks.1",))
    wanted = {n for n in region.nodes if graph.node_by_name[n].module.endswith((".up", ".qkv"))}
    saved = may_save(graph)(dataclasses.replace(region, saved=frozenset(wanted)))
    plan = put(model, graph, [dataclasses.replace(region, saved=saved)])
    n_runs = Counter(plan.schedule.order)
    down = [n for n in region.nodes if graph.node_by_name[n].module.endswith(".down")]
    noise = [n for n in region.nodes if "dropout_noise" in graph.node_by_name[n].op]
    assert [n_runs[n] for n in down] == [1]
    assert [n_runs[n] for n in noise] == [2, 2]
    assert_bitwise_identical(plain, model, batch)
    assert measure(model, batch, n_steps=1).peak_bytes <= plan.peak_bytes


@pytest.mark.slow
def test_fused_attention_of_the_cpu_draws_nothing_so_it_is_saved_before_dropout() -> None:
    graph = graph_of("gpt2")
    region = CheckpointRegion(nodes_of(graph, "blocks.0"), modules=("blocks.0",))
    attention = {n for n in region.nodes if "attention" in graph.node_by_name[n].op}
    asked = dataclasses.replace(region, saved=frozenset(attention))
    assert may_save(graph)(asked) == attention != set()


@pytest.mark.slow
def test_statistics_of_a_batch_norm_are_kept_though_its_result_is_overwritten() -> None:
    """So the convolution before it is not recomputed, and nor is the norm."""
    graph, model = graph_of("resnet"), small_resnet()
    region = CheckpointRegion(nodes_of(graph, "blocks.1"), modules=("blocks.1",))
    made = [graph.node_by_name[name] for name in region.nodes]
    wanted = {n.name for n in made if n.op.split(".")[1] in ("convolution", "relu")}
    norms = {n.name for n in made if "batch_norm" in n.op}
    saved = may_save(graph)(dataclasses.replace(region, saved=frozenset(wanted | norms)))
    assert norms <= saved
    plan = put(model, graph, [dataclasses.replace(region, saved=saved)])
    n_runs = Counter(plan.schedule.order)
    assert all(n_runs[name] == 1 for name in norms | wanted)
    plain, batch = small_resnet(), labelled_images()
    measured = measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes
    assert measured <= plan.peak_bytes
    assert_equal(one_step(plain, batch, 3), one_step(model, batch, 3))


def put(model: nn.Module, graph: Graph, regions: list[CheckpointRegion]) -> Any:
    plan = plan_regions(graph, regions, extra_bytes=extra_bytes(graph))
    _install(model, graph, plan)
    return plan


@pytest.mark.slow
def test_running_statistics_change_once() -> None:
    plain, model, batch, plan = exported("conv", 0.7)
    assert any(module.path.startswith("body") for module in plan.modules)
    one_step(model, batch, 0)
    assert int(model.body[0][1].num_batches_tracked) == 1
    one_step(plain, batch, 0)
    assert torch.equal(model.body[0][1].running_mean, plain.body[0][1].running_mean)


def test_the_module_stays_what_it_was_and_is_restored() -> None:
    plain, model, _, plan = exported("gpt2", 0.35)
    assert type(model) is type(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert any(isinstance(m.__dict__.get("forward"), CheckpointedForward) for m in model.modules())
    plan.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())
    plan.remove()  # nothing left to do


def test_an_export_without_checkpoints_is_removed_like_any_other() -> None:
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    solution = solve(model, batch, budget="1GB", loss=lambda output, _: output.mean())
    assert not to_torch_checkpoint(model, solution).modules
    with pytest.raises(ExportError, match="exported to this model already"):
        to_torch_checkpoint(model, solution)
    remove(model)
    assert "forward" not in model.__dict__


def test_a_forward_of_the_instance_is_put_back() -> None:
    model, batch = small_gpt2(), tokens()
    solution = solution_within("gpt2", 0.35)
    own = {id(block): block.forward for block in model.blocks}
    for block in model.blocks:
        block.forward = own[id(block)]
    plan = to_torch_checkpoint(model, solution)
    assert one_step(model, batch, 0)[0] == one_step(small_gpt2(), batch, 0)[0]
    plan.remove()
    assert all(block.__dict__["forward"] is own[id(block)] for block in model.blocks)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checkpointed_too_and_by_themselves(again: Any) -> None:
    plain, batch, graph = small_gpt2(), tokens(), graph_of("gpt2")
    model = copy.deepcopy(plain)
    nodes = [nodes_of(graph, path) for path in ("blocks.0", "blocks.1")]
    saved = frozenset(n for n in nodes[0] if "attention" in graph.node_by_name[n].op)
    assert saved
    put(
        model,
        graph,
        [
            CheckpointRegion(nodes[0], modules=("blocks.0",), saved=saved),
            CheckpointRegion(nodes[1], modules=("blocks.1",)),
        ],
    )
    copied = again(model)
    assert_equal(one_step(plain, batch, 3), one_step(copied, batch, 3))
    for block in (0, 1):
        assert copied.blocks[block].forward.n_runs == 2
        assert model.blocks[block].forward.n_runs == 0
    remove_torch_checkpoint(copied)
    assert not any("forward" in m.__dict__ for m in copied.modules())
    assert "forward" in model.blocks[0].__dict__


def test_without_gradients_the_forward_is_the_modules_own() -> None:
    _, model, batch, plan = exported("gpt2", 0.35)
    with torch.no_grad():
        model(*batch)
    assert all(model.get_submodule(m.path).forward.n_runs == 0 for m in plan.modules)


def test_the_numbers_beside_those_of_the_plan_are_told() -> None:
    _, _, _, plan = exported("gpt2", 0.35)
    text = str(plan)
    assert "overhead +" in text
    assert "the plan itself" in text
    assert f"+{100 * plan.overhead:.2f} %" in text
    assert f"+{100 * plan.planned_overhead:.2f} %" in text
    assert plan.overhead * plan.baseline_time_s == pytest.approx(plan.time_s - plan.baseline_time_s)
    assert all(module.path in text for module in plan.modules)


class ResidualGelu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x)) * 2
        return x.square().mean()


@pytest.mark.slow
def test_a_plan_that_the_export_is_compared_with_is_shown() -> None:
    """It is not the solution's, whose rewrites modules cannot run: with its figures, then used."""
    model, batch = ResidualGelu(), torch.randn(4096, 64)
    whole = solve(model, batch, budget="1GB")
    solution = solve(model, batch, budget=int(0.4 * whole.baseline.peak_bytes))
    *_, shown, used = str(to_torch_checkpoint(model, solution, on_excess="least")).splitlines()
    assert re.fullmatch(r"a plan of single .* as modules run it: [\d.]+ [KM]B, \+[\d.]+ %", shown)
    assert " that this plan recomputes " in used


@pytest.mark.slow
def test_nothing_fits_is_an_error_or_the_least_is_exported() -> None:
    model, batch = small_gpt2(), tokens()
    solution = solution_within("gpt2", 0.1)
    with pytest.raises(
        ExportError, match=r"takes at least [\d.]+ [KM]B \(.*apply\(model, solution\)"
    ):
        to_torch_checkpoint(model, solution)
    assert not any("forward" in m.__dict__ for m in model.modules())
    plan = to_torch_checkpoint(model, solution, on_excess="least")
    assert not plan.fits
    assert plan.peak_bytes > plan.budget_bytes >= plan.planned_peak_bytes
    assert "ABOVE THE BUDGET" in str(plan)
    assert measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes <= plan.peak_bytes
    # what the error says would be right is right
    wider = solution_of(solution.graph, solution.schedule, budget_bytes=plan.peak_bytes)
    plan.remove()
    assert to_torch_checkpoint(model, wider).fits


@pytest.mark.slow
def test_the_least_is_exported_where_only_a_rewritten_step_fits() -> None:
    model, batch = Towers(), torch.randn(64, 32)
    least_bytes = find_obstacle(trace(model, batch)).proven_bytes
    solution = solve(model, batch, budget=least_bytes - 1)
    assert solution.graph.meta.rewrites
    with pytest.raises(ExportError, match=r"without these nothing fits .* minimum budget found"):
        to_torch_checkpoint(model, solution)
    plan = to_torch_checkpoint(model, solution, on_excess="least")
    assert plan.peak_bytes > plan.budget_bytes == least_bytes - 1
    assert plan.planned_peak_bytes == solution.simulation.peak_bytes
    assert measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes <= plan.peak_bytes


class Tower(nn.Module):
    """Four layers, each with something to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32), nn.Tanh())
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Towers(nn.Module):
    """Modules around the lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.middle, self.high = Tower(), Tower(), Tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.middle(self.low(x))).square().mean()
