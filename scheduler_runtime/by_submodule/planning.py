"""Plan models that cannot be captured as one graph, by whole submodules measured in eager mode.

    solution = plan_chain(model, batch, budget="8GB")
    apply(model, solution)      # stock checkpointing of the chosen submodules
    remove(model)

The tracer refuses data-dependent control flow, custom autograd functions and hooks, for example.
Such a model still runs, so it can be observed (`scheduler_runtime.by_submodule.observe`). The
sequence of submodules that saves the most for backward, or several sequences, become a coarse
Graph. It has one forward and one backward node for each submodule, and for the operators that run
between two of them, with measured times and bytes. It is solved and simulated like any other graph.
The faster of two plans is taken: checkpoints of single submodules
(`solver.module_checkpointing.search`), or, if the submodules are the children of an nn.Sequential,
checkpoints of several neighbours together, which may be nested
(`solver.module_checkpointing.nested`).

This is coarser than a traced plan: a submodule is kept or recomputed as a whole, operators outside
of the submodules are not planned, and the lower bound holds for the coarse graph only. After
planning, one step runs with the plan. If it takes more memory than predicted, the difference is
counted as resident and the step is planned again, so the reported peak is one that was measured
(on the CPU).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphs.costs import Roofline
from graphs.hardware import named
from graphs.model_calls import TraceError, device_of, nested
from graphs.rewrites import Variants
from graphs.training_step import GivenOptimizer, optimizer_costs, with_optimizer
from scheduler_runtime.by_submodule.coarse_graph import coarse_graph, find_loop
from scheduler_runtime.by_submodule.eager_step import ObservedStep
from scheduler_runtime.by_submodule.observe import Observed, find_sequences, observe
from scheduler_runtime.by_submodule.solution import SubmoduleSolution, put_checkpoints
from scheduler_runtime.execute import no_watching_modes
from scheduler_runtime.surroundings import budget_for
from solver.module_checkpointing import (
    ModuleTree,
    NoModulesFitError,
    RegionPlan,
    best_in_loop,
    by_module,
    plan_regions,
)
from solver.schedule import (
    Compute,
    Obstacle,
    Request,
    Solution,
    baseline,
    plan_line,
    simulate,
)
from solver.sizes_deadlines_progress import (
    format_size,
    names_checked,
    now_s,
    tell,
    telling,
)
from solver.solving import answer

N_CORRECTIONS = 4
"""How often a step that takes more memory than predicted is planned again."""


class FallbackError(ValueError):
    """The model cannot be planned by submodules either; the message says why."""


@names_checked
def plan_chain(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | float | str,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    reserve: int | float | str | None = None,
    time_limit_s: float = 30.0,
) -> SubmoduleSolution:
    """Observe a few real training steps of the model and plan its submodules.

    The model is left as it was: parameters that `forward` changes, buffers, gradients and random
    state are restored. Each observed step starts with all gradients None.

    budget: bytes of the device for the whole step.
    reserve: the part of the budget that the step may not use (default: CUDA_RESERVE_BYTES on a CUDA
        device, else 0).
    loss, inputs, optimizer: as in `graphs.trace.trace`.
    time_limit_s: of the search for a plan.

    Raises FallbackError if the model is neither on the CPU nor on CUDA, no submodules run in
    sequence, no loss is found, or the memory of its step differs from step to step.
    """
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise FallbackError(
            f"the model is on {device}; real steps can be measured on cpu and cuda only"
        )
    budget_bytes, reserve_bytes = budget_for(model, budget, reserve)
    started_s = now_s()
    request = Request(budget_bytes, reserve_bytes, time_limit_s=time_limit_s)
    measuring = telling(f"measuring steps of {type(model).__name__}...")
    with measuring, no_watching_modes(), contextlib.ExitStack() as stack:
        try:
            step = ObservedStep(model, batch, loss=loss, inputs=inputs)
            changed_state = stack.enter_context(step.changed_state())
            sequences = find_sequences(model, step.forward)
            if not sequences:
                raise FallbackError(
                    f"{type(model).__name__} has no two submodules that the same module calls once "
                    "each in a step, so there is nothing to checkpoint; split it into submodules, "
                    "or make it traceable"
                )
            resident = nested.tensors(batch)
            observations = [
                observe(model, step.forward, blocks, resident=resident, release=step.release)
                for blocks in sequences
            ]
        except TraceError as error:
            raise FallbackError(str(error)) from error
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise FallbackError(
                f"{type(model).__name__} calls transforms of torch.func (grad, vjp) in its "
                "forward, under which PyTorch's checkpoints do not run: plan it with solve and "
                "apply"
            ) from error
        optimizer_figures = None
        if optimizer is not None:
            costs = Roofline(named("cpu"))
            optimizer_figures = optimizer_costs(optimizer, model, device=device, costs=costs)
        # The candidates are the best sequence alone, whose members can be checkpointed together in
        # an nn.Sequential, and several sequences; the better plan is taken.
        plans = (
            _plan_blocks(
                model, step, find_loop(model, observed), changed_state, optimizer_figures, request
            )
            for observed in observations
        )
        found = min(plans, key=_rank)
    tell(plan_line(found, how="planned by submodules", took_s=now_s() - started_s))
    return found


def _rank(solution: SubmoduleSolution) -> tuple[bool, float]:
    """Sort key: plans by overhead, then those where nothing fits, by the smallest peak reached."""
    if solution.simulation is None:
        assert solution.obstacle is not None
        return True, float(solution.obstacle.reached_bytes)
    return False, solution.simulation.time_s / (solution.baseline.time_s or 1.0)


def _plan_blocks(
    model: nn.Module,
    step: ObservedStep,
    observed: Observed,
    changed_state: tuple[str, ...],
    optimizer_figures: dict[str, Any] | None,
    request: Request,
) -> SubmoduleSolution:
    """Plan these submodules, and correct the plan until its measured peak is within the predicted.

    optimizer_figures: the costs of the optimizer's step (None: no optimizer).

    Raises FallbackError if that takes more than N_CORRECTIONS corrections.
    """
    unseen_bytes, excess_bytes = _unseen_bytes(step, observed), 0
    plain = with_optimizer(
        coarse_graph(step, observed, unseen_bytes=unseen_bytes), optimizer_figures
    )
    plan: RegionPlan | None = None
    for _ in range(1 + N_CORRECTIONS):
        graph = coarse_graph(step, observed, unseen_bytes=unseen_bytes)
        graph = with_optimizer(graph, optimizer_figures)
        # `plain` does not count what a plan took beyond its prediction, as the baseline does not
        # take it.
        with telling(f"planning {type(model).__name__}..."):
            solution = answer(Variants(plain, (graph,)), request)
        if plan is not None:  # measured already; the graph now counts what it took
            plan = plan_regions(graph, plan.regions, in_loop=plan.in_loop)
            if plan.peak_bytes <= solution.request.available_bytes:
                return _solution_with(solution, observed, plan, changed_state)
        plan, least_bytes = _fastest_that_fits(solution, observed)
        if plan is None:
            return _nothing_fits(solution, observed, least_bytes)
        found = _solution_with(solution, observed, plan, changed_state)
        measured_bytes = step.peak_bytes(functools.partial(put_checkpoints, model, found))
        excess_bytes = measured_bytes - _peak_in_step(found)
        if excess_bytes <= 0:
            return found
        unseen_bytes += excess_bytes
    raise FallbackError(
        f"the step takes {excess_bytes} bytes more than predicted, after {N_CORRECTIONS} "
        "corrections; its memory differs from step to step"
    )


def _unseen_bytes(step: ObservedStep, observed: Observed) -> int:
    """How many bytes the step without a plan takes beyond its predicted peak."""
    graph = coarse_graph(step, observed, unseen_bytes=0)
    predicted_bytes = simulate(graph, baseline(graph)).peak_bytes
    return max(0, step.peak_bytes(lambda: None) - predicted_bytes)


def _fastest_that_fits(solution: Solution, observed: Observed) -> tuple[RegionPlan | None, int]:
    """The fastest checkpoints that fit (None: none do), and the smallest peak found, in bytes.

    solution: the solved coarse graph; its schedule may recompute in ways that checkpoints cannot.
    """
    found: list[RegionPlan] = []
    least_bytes = solution.baseline.peak_bytes
    if solution.obstacle is not None:
        least_bytes = solution.obstacle.reached_bytes
    if solution.schedule is not None:
        paths = tuple(p.path for p in observed.parts if p.path and not p.overwritten)
        tree = ModuleTree(blocks=paths, parts=dict.fromkeys(paths, ()))
        try:
            plan = by_module(solution, tree, may_save=lambda _region: frozenset(), extra_bytes=None)
            found.append(plan)
        except NoModulesFitError as error:
            least_bytes = error.least.peak_bytes
    if observed.steps is not None:
        best, least_bytes = best_in_loop(
            solution.graph, observed.steps, budget_bytes=solution.request.available_bytes
        )
        if best is not None:
            found.append(best)
    return min(found, key=lambda plan: plan.rank, default=None), least_bytes


def _solution_with(
    solution: Solution, observed: Observed, plan: RegionPlan, changed_state: tuple[str, ...]
) -> SubmoduleSolution:
    slower_s = plan.simulation.time_s - solution.lower_bound_s
    return SubmoduleSolution.of(
        solution,
        schedule=plan.schedule,
        simulation=plan.simulation,
        status="optimal" if slower_s <= 1e-3 * solution.baseline.time_s else "feasible",
        obstacle=None,
        blocks=observed.blocks,
        checkpointed=tuple(path for region in plan.regions for path in region.modules),
        segments=plan.regions if plan.in_loop else (),
        container=observed.container,
        left_alone=_notes_on_unplanned(observed),
        changed_state=changed_state,
    )


def _nothing_fits(solution: Solution, observed: Observed, least_bytes: int) -> SubmoduleSolution:
    """A solution without a schedule; its obstacle tells the smallest peak that checkpoints reach.

    least_bytes: that peak.
    """
    obstacle = solution.obstacle or Obstacle(0, 0, None, "", ())
    return SubmoduleSolution.of(
        solution,
        schedule=None,
        simulation=None,
        status="time_limit" if solution.status == "time_limit" else "infeasible",
        obstacle=dataclasses.replace(
            obstacle,
            reached_bytes=max(obstacle.proven_bytes, least_bytes),
            schedule=None,
            cut_short=False,
        ),
        blocks=observed.blocks,
        left_alone=(
            *_notes_on_unplanned(observed),
            f"the smallest peak found is {format_size(least_bytes)}",
        ),
    )


def _peak_in_step(solution: Solution) -> int:
    """The predicted peak of forward and backward pass, without the optimizer's state and step.

    That is what `ObservedStep` measures.
    """
    assert solution.schedule is not None
    assert solution.simulation is not None
    state_bytes = sum(t.size_bytes for t in solution.graph.tensors if t.kind == "optimizer_state")
    live_bytes = zip(solution.schedule.ops, solution.simulation.live_bytes, strict=True)
    return max(n for op, n in live_bytes if op != Compute("optimizer_step")) - state_bytes


def _notes_on_unplanned(observed: Observed) -> tuple[str, ...]:
    outside_s = sum(part.forward_s for part in observed.parts if not part.path)
    total_s = sum(part.forward_s for part in observed.parts) or 1.0
    notes = [
        f"{100 * outside_s / total_s:.0f} % of the forward pass runs outside of these submodules"
    ]
    if overwritten := ", ".join(part.path for part in observed.parts if part.overwritten):
        how = (
            "are kept"
            if observed.steps is None
            else "are recomputed only together with those before them"
        )
        notes.append(f"the inputs of these are overwritten in place, so they {how}: {overwritten}")
    return tuple(notes)
