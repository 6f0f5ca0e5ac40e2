"""Plans that copy to host and disk: the same bits, the planned bytes, clear errors."""

from __future__ import annotations

import copy
import gc
import random
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
from scheduler_runtime.execute.cuda_graph import CudaGraphError, check_program
from scheduler_runtime.execute.restart_step import step_device
from scheduler_runtime.measuring import measure
from solver import solve
from solver.schedule import (
    Compute,
    CopyLayout,
    Drop,
    Fetch,
    Free,
    Link,
    Place,
    Places,
    Request,
    Schedule,
    Solution,
    Store,
    baseline,
    keep,
    simulate,
    simulate_unplanned,
)
from solver.schedule.simulator import IllegalScheduleError
from solver.solving import answer
from solver.solving.problem import as_step
from tests.support import bitwise
from tests.support.bitwise import LARGE, MODELS, assert_bitwise_identical, assert_equal, one_step
from tests.support.example_models import small
from tests.support.pools import made_pools
from tests.support.schedules_with_copies import copy_away, random_copies, unused_gaps

__all__ = ["made_pools"]

LINK = Link(5e10, 5e10)
PLACES = Places(host=Place(LARGE, LINK), disk=Place(LARGE, LINK))
solution_of = partial(bitwise.solution_of, places=PLACES)


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
    chosen = [gap for gap in unused_gaps(graph, schedule) if gap.stop - gap.start > 6]
    return copy_away(graph, schedule, chosen)


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
    ((_, bound),) = model.forward._programs.programs
    return bound.program.copy_layout


@pytest.mark.slow(keep=8)
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
    assert_bitwise_identical(model, planned, batch, loss)
    assert not list(tmp_path.iterdir())


def with_copies(
    model: nn.Module, batch: Any, *, share: float = 0.75, costs: str | None = None
) -> Solution:
    """A solved plan, with rewrites, whose idle storages are on the host."""
    step, *_ = as_step(model, batch, {"costs": costs}, others=())
    resident_bytes = step.plain.resident_bytes
    above_bytes = simulate_unplanned(step.plain).peak_bytes - resident_bytes
    request = Request(int(resident_bytes + share * above_bytes), time_limit_s=600)
    solution = answer(step, request, thorough=True)
    assert solution.schedule is not None
    return solution_of(solution.graph, all_away(solution.graph, solution.schedule))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet50", "unet"])
def test_examples_keep_their_bits_and_the_planned_bytes(name: str) -> None:
    model, batch = small(name)
    # the workspace of convolutions depends on the CPU: it is only known where it is measured
    convolves = name in ("resnet50", "unet")
    solution = with_copies(model, batch, costs="measured" if convolves else None)
    planned = apply(copy.deepcopy(model), solution)
    assert_bitwise_identical(model, planned, batch)
    planned.zero_grad()
    gc.collect()
    measured_bytes = measure(planned, batch).peak_bytes
    predicted_bytes = solution.simulation.peak_bytes
    assert measured_bytes <= predicted_bytes
    if convolves:  # as exact as without copies
        assert measured_bytes == predicted_bytes
    assert measured_bytes > 0.95 * predicted_bytes
    host_bytes = solution.simulation.host_peak_bytes
    assert host_bytes <= layout_of(planned).host_bytes <= 1.03 * host_bytes


@pytest.mark.slow
class Classes(nn.Sequential):
    """Its loss outside takes several times the memory of its hidden layers."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(128, 128), nn.Tanh()] * 6, nn.Linear(128, 1024))

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(512, 128, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, torch.arange(len(batch)))


def test_what_is_fetched_after_a_loss_outside_takes_no_memory_in_the_loss() -> None:
    torch.manual_seed(0)
    model, batch, loss = Classes(), Classes.batch(), Classes.loss
    graph = trace(model, batch, loss=loss)

    def end_of_loss(schedule: Schedule) -> int:
        names = [op.node if isinstance(op, Compute) else "" for op in schedule.ops]
        return 1 + max(i for i, name in enumerate(names) if name.startswith("loss."))

    plain = baseline(graph)
    at, hidden = end_of_loss(plain), [n for n in graph.producer if n.startswith("tanh")]
    unused = [gap for gap in unused_gaps(graph, plain) if gap.storage in hidden]
    gaps = [gap for gap in unused if gap.start < at <= gap.stop]
    schedule = copy_away(graph, plain, gaps)
    after = end_of_loss(schedule)
    while isinstance(schedule.ops[after], Free):
        after += 1
    done, rest = schedule.ops[:after], schedule.ops[after:]
    fetches = [op for op in rest if isinstance(op, Fetch)]
    rest = [op for op in rest if op not in fetches]
    solution = solution_of(graph, replace(schedule, ops=(*done, *fetches, *rest)))
    planned = apply(copy.deepcopy(model), solution)
    assert_bitwise_identical(model, planned, batch, loss)
    planned.zero_grad()
    gc.collect()
    assert measure(planned, batch, loss=loss).peak_bytes <= solution.simulation.peak_bytes


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
    assert solution.schedule.has_copies
    planned = apply(copy.deepcopy(model), solution)
    assert_bitwise_identical(model, planned, batch)
    planned.zero_grad()
    gc.collect()
    assert measure(planned, batch).peak_bytes <= budget_bytes


@pytest.mark.slow
def test_what_is_away_takes_no_device_memory(made_pools: list[copies_module.Pool]) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    solution = solution_of(graph, all_away(graph, baseline(graph)))
    assert solution.simulation.peak_bytes < 0.8 * solution.baseline.peak_bytes
    planned = apply(copy.deepcopy(model), solution)
    one_step(planned, batch, 0)
    planned.zero_grad()
    gc.collect()
    share = measure(planned, batch).peak_bytes / solution.simulation.peak_bytes
    assert 0.95 < share <= 1.0
    assert len(made_pools) == 1


@pytest.mark.slow
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
    assert_equal(*results)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert_equal(*results)
    assert len(made_pools) == 3


@pytest.mark.slow
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
    assert_bitwise_identical(model, planned, batch)


@pytest.mark.slow
def test_a_saved_plan_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    solution = solve(model, batch, budget="1GB", time_limit_s=600)
    assert solution.schedule is not None
    schedule = by_disk(solution.graph, solution.schedule)
    path = tmp_path / "schedule.json"
    solution_of(solution.graph, schedule).save(path)
    planned = apply(copy.deepcopy(model), path, disk_directory=tmp_path)
    assert_bitwise_identical(model, planned, batch)


def test_a_scalar_on_the_cpu_does_not_move_a_step_on_a_card() -> None:
    """The meta device stands for the card."""
    scalar, weight = torch.ones(()), torch.ones(2, device="meta")
    assert step_device([scalar, weight]).type == "meta"
    assert step_device([scalar]).type == "cpu"
    assert step_device([]).type == "cpu"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_recorded_step_cannot_copy() -> None:
    torch.manual_seed(0)
    model, batch = Tower(), Tower.batch()
    graph = trace(model, batch)
    planned = apply(model, solution_of(graph, all_away(graph, baseline(graph))))
    planned(batch)
    ((_, bound),) = planned.forward._programs.programs
    assert isinstance(bound, BoundProgram)
    with pytest.raises(CudaGraphError, match="copies tensors to host memory"):
        check_program(bound)
