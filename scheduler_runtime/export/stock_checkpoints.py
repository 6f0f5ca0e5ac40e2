"""Export a plan as stock checkpoints of a model's own modules, which run their own code.

`torch.utils.checkpoint` recomputes a module as a whole, while a schedule works on single operators.
So the closest module-level plan is exported: `solver.module_checkpointing.search` chooses it, and
the simulator gives its peak and time. For a solution made with `fsdp=`, these are the figures of
one rank; `checkpoint_solver.fsdp.shard` shards the model as planned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from graphs.fsdp import sharding_words
from graphs.graph import Graph
from graphs.zero import zero_words
from scheduler_runtime.execute import (
    CheckpointedForward,
    ExportedForward,
    ForwardWithChunkedLoss,
    exports_in,
    names_inside,
    remove_torch_checkpoint,
)
from scheduler_runtime.export.exportable import (
    ExportError,
    check_exportable,
    differentiated_words,
    module_tree,
)
from scheduler_runtime.export.selective_calls import extra_bytes, may_save, saved_calls
from scheduler_runtime.planned import Ranks, RanksDisagreeError, check_order
from solver.module_checkpointing import (
    CheckpointRegion,
    NoModulesFitError,
    RegionLayout,
    RegionPlan,
    by_module,
)
from solver.schedule import Schedule, Solution
from solver.sizes_deadlines_progress import (
    counted,
    format_both,
    format_share,
    format_size,
    format_size_up,
)
from solver.solving import NoPlainStepError, answer, for_stock_modules


@dataclass(frozen=True)
class ExportedModule:
    """A checkpointed module.

    path: path of the module in the model.
    mode: "checkpoint" (all of it is recomputed) or "selective" (all but `saved`).
    n_recomputations: how often a step recomputes the module.
    saved: names of the graph nodes whose results are kept.
    inside: paths of the checkpointed modules around it, the outermost first.
    """

    path: str
    mode: Literal["checkpoint", "selective"]
    n_recomputations: int
    saved: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportedStep:
    """A training step of a model with an exported plan.

    schedule, peak_bytes, time_s: of the exported plan, from the simulator.
    planned_time_s: time of the solution's own schedule.
    baseline_time_s: time of the step without a plan.
    budget_bytes: the budget after the reserve.
    lost: sentences on what the exported plan cannot do, compared with the solution.
    """

    schedule: Schedule = field(repr=False)
    peak_bytes: int
    time_s: float
    planned_time_s: float
    baseline_time_s: float
    budget_bytes: int
    lost: tuple[str, ...]
    _model: nn.Module = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether the exported plan keeps to the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def overhead(self) -> float:
        """Extra time as a share of the step without a plan."""
        return (self.time_s - self.baseline_time_s) / (self.baseline_time_s or 1.0)

    @property
    def planned_overhead(self) -> float:
        """The overhead of the solution's own schedule, which `apply` would run."""
        return (self.planned_time_s - self.baseline_time_s) / (self.baseline_time_s or 1.0)

    def remove(self) -> None:
        """Give the modules their own forwards back, as `checkpoint_solver.remove(model)` does.

        Safe to call twice, say in a `finally`.
        """
        remove_torch_checkpoint(self._model)


@dataclass(frozen=True, kw_only=True)
class Export(ExportedStep):
    """What was exported to the model as checkpoints, and what a step takes with it.

    modules: the checkpointed modules.
    losses_in_chunks: how many calls of `F.cross_entropy` run in row chunks.
    planned_peak_bytes: peak of the solution's own schedule.
    sharded: how the step is sharded, such as "per rank of 8, FSDP2"; "" if it is not.
    """

    modules: tuple[ExportedModule, ...]
    losses_in_chunks: int
    planned_peak_bytes: int
    sharded: str

    def __str__(self) -> str:
        per_rank = f" ({self.sharded})" if self.sharded else ""
        lines = [
            f"peak {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}{per_rank}, "
            f"overhead {format_share(self.overhead)} (the plan itself: "
            f"{format_size(self.planned_peak_bytes)}, {format_share(self.planned_overhead)})"
            + ("" if self.fits else ": ABOVE THE BUDGET, nothing smaller was found")
        ]
        for module in self.modules:
            what = "checkpointed"
            if module.mode == "selective":
                what += f" but for {counted(len(module.saved), 'operator')}"
            lines.append(f"  {module.path}: {what}, recomputed {module.n_recomputations}x")
        if self.losses_in_chunks:
            calls = counted(self.losses_in_chunks, "call")
            lines.append(f"  {calls} of F.cross_entropy in row chunks")
        return "\n".join([*lines, *self.lost])


def to_torch_checkpoint(
    model: nn.Module, solution: Solution, *, on_excess: Literal["error", "least"] = "error"
) -> Export:
    """Checkpoint the modules that the solution's schedule says to recompute.

    Changes the model: replaces the forward of these modules. Parameters, their names and the state
    dict stay; `Export.remove` undoes it.

    solution: from solve(model, ...); its graph says which module each operator belongs to.
    on_excess: what to do if no module-level plan fits the budget: "error" raises ExportError,
        "least" exports the plan with the smallest peak found (see `Export.fits`).

    Raises ExportError if the solution has no schedule or was loaded without the plain step, if the
    model is not the planned one or has a plan already, and if nothing fits. The ranks of a
    tensor-parallel model export together; raises RanksDisagreeError if another rank cannot export,
    or exports another plan.
    """
    if on_excess not in ("error", "least"):
        raise ValueError(f"on_excess is {on_excess!r}; 'error' or 'least'")
    check_order(model, solution, call="to_torch_checkpoint")
    ranks = Ranks.of(model)
    if ranks is None:
        return _export(model, solution, on_excess)
    with ranks.sending_errors():
        export = _export(model, solution, on_excess)
        words = json.dumps(exports_in(model))
        try:
            ranks.agree({"the exported plan": hashlib.sha256(words.encode()).hexdigest()[:12]})
        except RanksDisagreeError:
            export.remove()
            raise
    return export


def _export(model: nn.Module, solution: Solution, on_excess: str) -> Export:
    check_exportable(model, solution, call="to_torch_checkpoint")
    assert solution.simulation is not None
    step, plan = _choose_modules(model, solution, or_least=on_excess == "least")
    _install(model, step.graph, plan)
    return Export(
        modules=tuple(_exported_modules(plan.regions, plan)),
        losses_in_chunks=len(step.graph.meta.called_losses),
        schedule=plan.schedule,
        peak_bytes=plan.peak_bytes,
        time_s=plan.simulation.time_s,
        planned_peak_bytes=solution.simulation.peak_bytes,
        planned_time_s=solution.simulation.time_s,
        baseline_time_s=solution.baseline.time_s,
        budget_bytes=solution.request.available_bytes,
        lost=tuple(_limitations(step, plan, is_own=step.graph.graph_id == solution.graph.graph_id)),
        sharded=_sharded_words(solution),
        _model=model,
    )


def _sharded_words(solution: Solution) -> str:
    """How the step is sharded, as in `Export.sharded`; "": it is not."""
    environment = solution.environment
    return sharding_words(environment) or zero_words(environment, sharded=True)


def _choose_modules(
    model: nn.Module, solution: Solution, *, or_least: bool
) -> tuple[Solution, RegionPlan]:
    """Choose a step and the modules to checkpoint.

    Stock modules cannot run every rewrite, so there are several steps to try, each planned operator
    by operator. The first in which some choice of modules fits is returned, with that choice.

    or_least: if nothing fits, return the choice with the smallest peak instead of raising
        ExportError.
    """
    too_large: list[tuple[Solution, RegionPlan]] = []
    without_schedule: list[Solution] = []
    try:
        for each in for_stock_modules(solution):
            if each.schedule is None:
                without_schedule.append(each)
                continue
            try:
                return each, _by_module(model, each)
            except NoModulesFitError as error:
                too_large.append((each, error.least))
    except NoPlainStepError as error:
        raise ExportError(str(error)) from None
    if not too_large and or_least:
        return _least_peak_choice(model, without_schedule)
    if not too_large:
        least = min(without_schedule, key=lambda each: each.minimum_budget_bytes or math.inf)
        raise ExportError(
            "the plan rewrites the step in ways that checkpointed modules cannot, and without "
            f"these nothing fits {format_size(least.request.available_bytes)}"
            f'{least.obstacle_text}; give more, or on_excess="least"'
        )
    step, plan = min(too_large, key=lambda each: each[1].peak_bytes)
    if not or_least:
        raise _nothing_fits(model, solution, plan)
    return step, plan


def _by_module(model: nn.Module, step: Solution) -> RegionPlan:
    """The module-level plan closest to the step's schedule. Raises NoModulesFitError."""
    return by_module(
        step,
        module_tree(model, step.graph),
        may_save=may_save(step.graph),
        extra_bytes=extra_bytes(step.graph),
    )


def _least_peak_choice(model: nn.Module, steps: Iterable[Solution]) -> tuple[Solution, RegionPlan]:
    """For steps without a schedule within the budget: the module-level plan of the smallest peak,
    found by planning each step with the least budget that it can have."""
    found: list[tuple[Solution, RegionPlan]] = []
    for each in steps:
        if each.minimum_budget_bytes is None:
            continue
        request = replace(each.request, budget_bytes=each.minimum_budget_bytes, reserve_bytes=0)
        step = answer(each.graph, request)
        if step.schedule is not None:
            try:
                found.append((step, _by_module(model, step)))
            except NoModulesFitError as error:
                found.append((step, error.least))
    if not found:
        raise ExportError("no schedule was found for any step that stock modules can run")
    return min(found, key=lambda each: each[1].peak_bytes)


def _nothing_fits(model: nn.Module, solution: Solution, least: RegionPlan) -> ExportError:
    assert solution.simulation is not None
    least_bytes = least.peak_bytes
    finer = (
        f"apply(model, solution) keeps to {format_both(solution.simulation.peak_bytes)}; or solve"
    )
    if words := _sharded_words(solution):
        finer = f"These figures are {words}. Solve"
    reserve_bytes = solution.request.reserve_bytes
    also = f", and {words}" if (words := differentiated_words(solution.graph)) else ""
    return ExportError(
        f"{format_both(solution.request.available_bytes)} are available, and checkpointing modules "
        f"of {type(model).__name__} takes at least {format_both(least_bytes)}: PyTorch recomputes "
        f"modules as a whole, and does not recompute operators called outside of them{also}. "
        f"{finer} "
        f"with a budget of {format_size_up(least_bytes + reserve_bytes)}, or give "
        'on_excess="least"'
    )


def _install(model: nn.Module, graph: Graph, plan: RegionPlan) -> None:
    # a node without outputs writes a buffer in place
    written = {n for node in graph.forward_nodes if not node.outputs for n in node.inputs}
    changed = sorted(path for path, tensor in graph.meta.buffers.items() if tensor in written)
    layout = RegionLayout(graph, plan.regions)
    if graph.meta.called_losses:
        model.forward = ForwardWithChunkedLoss(model, graph.meta.called_losses)
    elif not plan.regions:  # so that `remove` finds an export, whatever it has chosen
        model.forward = ExportedForward(model)
    for region in (inside for top in plan.regions for inside in top.flat()):
        module = model.get_submodule(region.path)
        module.forward = CheckpointedForward(
            module,
            saved=saved_calls(layout, region) if region.saved else None,
            changed_buffers=names_inside(changed, region.path),
            # what is traced draws from torch's default generators only
            draws_elsewhere=bool(graph.meta.opaque_parts),
        )


def _exported_modules(
    regions: Iterable[CheckpointRegion], plan: RegionPlan, inside: tuple[str, ...] = ()
) -> Iterator[ExportedModule]:
    for region in regions:
        yield ExportedModule(
            path=region.path,
            mode="selective" if region.saved else "checkpoint",
            n_recomputations=plan.n_recomputations[region.path],
            saved=tuple(name for name in region.nodes if name in region.saved),
            inside=inside,
        )
        yield from _exported_modules(region.inner, plan, (*inside, region.path))


def _limitations(solution: Solution, plan: RegionPlan, *, is_own: bool) -> Iterator[str]:
    """Sentences on what checkpointing modules does not do, although the solution does.

    is_own: whether `solution` is the one that the user gave. If not, it is for a step without some
        of the rewrites, and its figures are shown nowhere else.
    """
    assert solution.schedule is not None
    assert solution.simulation is not None
    slower_s = plan.simulation.time_s - solution.simulation.time_s
    inside = {name for region in plan.regions for name in region.nodes}
    n_runs = Counter(solution.schedule.order)
    outside = [name for name, n in n_runs.items() if n > 1 and name not in inside]
    compared = "the plan itself" if is_own else "this plan"
    if not is_own and (slower_s > 0 or outside):
        peak = format_size(solution.simulation.peak_bytes)
        yield (
            f"a plan of single operators for the step as modules run it: {peak}, "
            f"{format_share(solution.overhead)}"
        )
    if slower_s > 0:
        share = 100 * slower_s / (solution.baseline.time_s or 1.0)
        yield f"the step takes {share:.2f} % longer than with {compared}"
    if outside:
        one = len(outside) == 1
        yield (
            f"{counted(len(outside), 'operator')} that {compared} recomputes "
            f"{'is' if one else 'are'} in no checkpointed module and {'stays' if one else 'stay'} "
            f"saved ({', '.join(outside[:3])}{', ...' if len(outside) > 3 else ''})"
        )
    if words := differentiated_words(solution.graph):
        yield f"left alone, since {words}"
    if plan.refused:
        path, reason = next(iter(plan.refused.items()))
        modules = counted(len(plan.refused), "module")
        yield f"{modules} cannot be checkpointed alone; {path}: {reason}"
