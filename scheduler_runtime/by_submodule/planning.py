"""Plans for models that cannot be captured as one graph: by submodules, measured in eager mode.

    solution = plan_chain(model, batch, budget="8GB")
    apply(model, solution)      # stock checkpointing of the chosen submodules
    remove(model)

Data-dependent control flow, custom autograd functions, hooks: what the tracer refuses still runs,
and can be watched while it does (`scheduler_runtime.by_submodule.observe`). The row of submodules
that puts by the most becomes a coarse Graph, one forward and one backward node for each of them and
for what runs in between, with times and bytes as measured. It is solved and judged like any other
graph. What carries it out is the faster of two, judged on that graph: checkpoints of single
submodules (`solver.module_checkpointing.search`), or, where the row is the children of an
nn.Sequential, of neighbours together and nested (`solver.module_checkpointing.nested`).

Coarser than a traced plan: a submodule is kept or run again as a whole, what runs outside of them
is left alone, and the bound holds for this coarse graph alone. After planning one step runs with
the plan in place; where it took more than was predicted, the difference is counted as resident and
the plan is made again, so that the peak that is told is one that was kept (on the CPU).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import TraceError, device_of, nested
from graphs.costs import CostModel, Roofline
from graphs.hardware import named
from graphs.training_step import optimizer_figures, with_optimizer
from scheduler_runtime.by_submodule.coarse_graph import (
    Loop,
    coarse_graph,
    container_of,
    loop_of,
    without_gaps,
)
from scheduler_runtime.by_submodule.eager_step import ObservedStep
from scheduler_runtime.by_submodule.observe import Observed, find_sequence, observe
from scheduler_runtime.by_submodule.solution import SubmoduleSolution, put
from scheduler_runtime.execute import torch_checkpoint
from scheduler_runtime.surroundings import budget_on
from solver.common import counted, format_size
from solver.module_checkpointing import (
    CheckpointRegion,
    ModuleTree,
    NoModulesFitError,
    RegionPlan,
    best_in_loop,
    by_module,
    plan_regions,
)
from solver.runtime_hooks import NoRowError, Planned
from solver.schedule import Obstacle, Solution
from solver.solving import solve

N_CORRECTIONS = 4


class FallbackError(NoRowError):
    """The model cannot be planned by submodules either; says why."""


def plan_chain(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    reserve: int | str | None = None,
    time_limit_s: float = 30.0,
) -> SubmoduleSolution:
    """Watch a few real training steps of the model and plan its submodules; changes nothing.

    budget, reserve: bytes of the device for the whole step, and of those what it may not use
    (default: CUDA_RESERVE_BYTES on a CUDA device, else 0). loss,
    inputs, optimizer: as in `graphs.trace.trace`. Gradients are set to None before each step.

    Raises FallbackError where no row of submodules was seen.
    """
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise FallbackError(
            f"the model is on {device}; real steps are measured on cpu and cuda alone"
        )
    budget_bytes, reserve_bytes = budget_on(device, budget, reserve)
    try:
        step = ObservedStep(model, batch, loss=loss, inputs=inputs)
        watched = _watched(model, step)
    except TraceError as error:
        raise FallbackError(str(error)) from error
    changed_buffers = step.changed_buffers()
    costs: CostModel = Roofline(named("cpu"))
    figures = (
        None
        if optimizer is None
        else optimizer_figures(optimizer, model, device=device, costs=costs)
    )
    unseen_bytes, excess_bytes = 0, 0
    chosen: RegionPlan | None = None
    for _ in range(1 + N_CORRECTIONS):
        graph = coarse_graph(
            model, step, watched.observed, row=watched.loop is not None, unseen_bytes=unseen_bytes
        )
        if figures is not None:
            graph = with_optimizer(graph, figures)
        solution = solve(
            graph, budget=budget_bytes, reserve=reserve_bytes, time_limit_s=time_limit_s
        )
        if chosen is not None:  # it ran, and took what is counted now
            chosen = plan_regions(graph, chosen.regions, in_loop=chosen.in_loop)
            if chosen.peak_bytes <= solution.request.available_bytes:
                return _solution(solution, watched, chosen, changed_buffers)
        chosen, least_bytes = _choose(solution, watched)
        if chosen is None:
            return _nothing_fits(solution, watched, least_bytes)
        found = _solution(solution, watched, chosen, changed_buffers)
        excess_bytes = _measured_bytes(model, step, found) - _peak_in_step(found)
        if excess_bytes <= 0:
            return found
        unseen_bytes += excess_bytes
    raise FallbackError(
        f"the step takes {excess_bytes} bytes more than predicted, after {N_CORRECTIONS} "
        "corrections; its memory differs from step to step"
    )


@dataclass(frozen=True)
class _Watched:
    """blocks: the row. loop: where an nn.Sequential runs it and steps can be put together."""

    blocks: tuple[str, ...]
    observed: Observed
    loop: Loop | None

    @property
    def is_recomputable(self) -> tuple[str, ...]:
        """The blocks that can run again by themselves."""
        return tuple(p.path for p in self.observed.pieces if p.path and not p.overwritten)


def _watched(model: nn.Module, step: ObservedStep) -> _Watched:
    blocks = find_sequence(model, step.forward)
    if not blocks:
        raise FallbackError(
            f"{type(model).__name__} has no two submodules that the same module calls once each in "
            "a step, so there is nothing to checkpoint; split it into submodules, or make it "
            "traceable"
        )
    observed = observe(model, step.forward, blocks, resident=nested.tensors(step.batch))
    container = container_of(model, blocks)
    if container is None:
        return _Watched(blocks, observed, None)
    without = without_gaps(observed)
    loop = loop_of(container, without)
    return _Watched(blocks, observed if loop is None else without, loop)


def _choose(solution: Solution, watched: _Watched) -> tuple[RegionPlan | None, int]:
    """The fastest that fits, and the smallest peak that was found."""
    found: list[RegionPlan] = []
    least = [] if solution.obstacle is None else [solution.obstacle.reached_bytes]
    if solution.schedule is not None:
        possible = watched.is_recomputable
        tree = ModuleTree(blocks=possible, parts=dict.fromkeys(possible, ()))
        try:
            plan = by_module(solution, tree, may_save=_nothing, extra_bytes_per_region=0)
            found.append(plan)
        except NoModulesFitError as error:
            least = [error.least.peak_bytes]
    if watched.loop is not None:
        best, least_bytes = best_in_loop(
            solution.graph, watched.loop.row, budget_bytes=solution.request.available_bytes
        )
        least = [least_bytes]
        if best is not None:
            found.append(best)
    chosen = min(found, key=lambda plan: plan.rank, default=None)
    return chosen, min(least, default=solution.baseline.peak_bytes)


def _solution(
    solution: Solution, watched: _Watched, chosen: RegionPlan, changed_buffers: tuple[str, ...]
) -> SubmoduleSolution:
    proven = chosen.simulation.time_s - solution.lower_bound_s <= 1e-3 * solution.baseline.time_s
    return _as_submodules(
        solution,
        watched,
        schedule=chosen.schedule,
        simulation=chosen.simulation,
        status="optimal" if proven else "feasible",
        obstacle=None,
        checkpointed=tuple(path for region in chosen.regions for path in region.modules),
        segments=chosen.regions if chosen.in_loop else (),
        container=watched.loop.container if watched.loop is not None else "",
        left_alone=tuple(_left_alone(watched)),
        changed_buffers=changed_buffers,
    )


def _nothing_fits(solution: Solution, watched: _Watched, least_bytes: int) -> SubmoduleSolution:
    """With the smallest peak that was found as the least budget."""
    obstacle = solution.obstacle
    known = (
        (0, "", ())
        if obstacle is None
        else (obstacle.proven_bytes, obstacle.op, obstacle.on_device)
    )
    return _as_submodules(
        solution,
        watched,
        schedule=None,
        simulation=None,
        status="time_limit" if solution.status == "time_limit" else "infeasible",
        obstacle=Obstacle(known[0], max(known[0], least_bytes), None, known[1], known[2]),
        left_alone=(
            *_left_alone(watched),
            f"the smallest peak that was found is {format_size(least_bytes)}",
        ),
    )


def _as_submodules(solution: Solution, watched: _Watched, **values: Any) -> SubmoduleSolution:
    kept = {f.name: getattr(solution, f.name) for f in dataclasses.fields(Solution)}
    return SubmoduleSolution(**{**kept, "blocks": watched.blocks, **values})


def _measured_bytes(model: nn.Module, step: ObservedStep, solution: SubmoduleSolution) -> int:
    return step.peak_bytes(
        lambda: put(model, solution), lambda: torch_checkpoint.remove_torch_checkpoint(model)
    )


def _peak_in_step(solution: Solution) -> int:
    """The most while forward and backward run; optimizer state, which is not measured, left out."""
    assert solution.simulation is not None
    graph = solution.graph
    state = sum(t.size_bytes for t in graph.tensors if t.kind == "optimizer_state")
    steps = zip(solution.schedule.ops, solution.simulation.live_bytes, strict=True)  # type: ignore[union-attr]
    before = [live for op, live in steps if getattr(op, "node", "") != "optimizer_step"]
    return max(before) - state


def _nothing(_region: CheckpointRegion) -> frozenset[str]:
    return frozenset()


def _left_alone(watched: _Watched) -> Iterator[str]:
    pieces = watched.observed.pieces
    outside_s = sum(p.forward_s for p in pieces if not p.path)
    total_s = sum(p.forward_s for p in pieces)
    yield f"{100 * outside_s / (total_s or 1.0):.0f} % of the forward pass runs outside of them"
    overwritten = ", ".join(piece.path for piece in pieces if piece.overwritten)
    if overwritten:
        how = (
            "are kept"
            if watched.loop is None
            else "run again only together with what is before them"
        )
        yield f"what these read is overwritten, so they {how}: {overwritten}"


def planned_for_command(
    *,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[Any, Any], torch.Tensor] | None,
    inputs: Callable[[Any], Any] | None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: str,
    budget_bytes: int,
    reserve_bytes: int,
    time_limit_s: float,
) -> Planned:
    """For the command `solve`. See solver.runtime_hooks.SubmodulePlanner."""
    real = model().to(device)
    example = nested.map_tensors(lambda tensor: tensor.to(device), batch())
    solution = plan_chain(
        real,
        example,
        budget=budget_bytes,
        reserve=reserve_bytes,
        loss=loss,
        inputs=inputs,
        optimizer=optimizer(real),
        time_limit_s=time_limit_s,
    )
    planned = counted(len(solution.blocks), "submodule")
    parts = [f"Planned by submodules, measured in eager mode: {planned}."]
    parts += solution.parts
    parts += solution.left_alone
    if solution.schedule is not None:
        parts.append(
            "A schedule of submodules is no program for apply(): in the training script, "
            "apply(model, scheduler_runtime.fallback.plan_chain(model, batch, budget=...))."
        )
    return Planned(solution, tuple(part[:1].upper() + part[1:] for part in parts))


__all__ = [
    "FallbackError",
    "SubmoduleSolution",
    "plan_chain",
    "planned_for_command",
    "put",
]
