"""Export a plan as stock checkpointing of a model's own modules; the training step stays as it is.

    exported = to_torch_checkpoint(model, solution)
    print(exported)      # which modules are checkpointed how, and what that costs
    ...                  # train as before: torch.compile, PEFT, DDP and FSDP2 go on top
    exported.remove()

`torch.utils.checkpoint` recomputes whole modules, all of one at once; a schedule of single
operators is finer. So what is exported is the closest module-level plan: chosen by
`solver.module_checkpointing.search`, with peak and time from the simulator. For a solution made
with `fsdp=` they are those of one rank; `checkpoint_solver.fsdp.shard` shards the model as planned.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from graphs.capture import caching_configs, has_parallel_style
from graphs.fsdp import called_children, is_container, listed_blocks, sharding_words
from graphs.graph import Graph, is_under
from graphs.host_state import with_state_on_device
from scheduler_runtime.execute import (
    CheckpointedForward,
    ExportedForward,
    checkpoints_of,
    names_inside,
    remove_torch_checkpoint,
)
from scheduler_runtime.planned import PlannedForward, Ranks, RanksDisagreeError, check_order
from scheduler_runtime.selective_calls import extra_bytes, may_save, saved_calls
from solver.module_checkpointing import (
    CheckpointRegion,
    ModuleTree,
    NoModulesFitError,
    RegionLayout,
    RegionPlan,
    by_module,
)
from solver.schedule import Schedule, Solution
from solver.sizes_deadlines_progress import counted, format_share, format_size
from solver.solving import NoPlainStepError, answer, without_rewrites


class ExportError(ValueError):
    """The plan cannot be exported to this model; says what was given and what would be right."""


@dataclass(frozen=True)
class ExportedModule:
    """A checkpointed module.

    path: of the module.
    mode: "checkpoint" (all of it is recomputed) or "selective" (all but `saved`).
    n_recomputations: how often a step recomputes it.
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
    """A step with what was exported to the model.

    schedule, peak_bytes, time_s: of the exported plan, by the simulator.
    planned_time_s: of the solution's own schedule. baseline_time_s: of the step without a plan.
    lost: sentences on what the exported plan cannot do.
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
        """The same of the solution's own schedule, which `apply` would run."""
        return (self.planned_time_s - self.baseline_time_s) / (self.baseline_time_s or 1.0)

    def remove(self) -> None:
        """Give the modules their own forwards back, as `checkpoint_solver.remove(model)` does.

        Safe to call twice, say in a `finally`.
        """
        remove_torch_checkpoint(self._model)


@dataclass(frozen=True, kw_only=True)
class Export(ExportedStep):
    """What was exported to the model as checkpoints, and what a step takes with it.

    planned_peak_bytes: of the solution's own schedule.
    sharded: "per rank of 8, FSDP2", or "" for a step that is not sharded.
    """

    modules: tuple[ExportedModule, ...]
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
        return "\n".join([*lines, *self.lost])


def to_torch_checkpoint(
    model: nn.Module, solution: Solution, *, on_excess: Literal["error", "least"] = "error"
) -> Export:
    """Checkpoint the modules that the solution's schedule says to recompute; changes the model.

    The model's parameters, names and state dict stay; `Export.remove` undoes it.

    solution: from solve(model, ...); its graph says which module each operator belongs to.
    on_excess: where no module-level plan fits the budget: "error", or "least": export the one with
        the smallest peak found, and say so (`Export.fits`).

    Raises ExportError where the solution has no schedule or was loaded without the plain step, the
    model is not the one that was planned, has a plan already, or nothing fits. Ranks of a
    tensor-parallel model export together: RanksDisagreeError where another cannot, or exports
    another plan.
    """
    if on_excess not in ("error", "least"):
        raise ValueError(f"on_excess is {on_excess!r}; 'error' or 'least'")
    check_order(model, solution, call="to_torch_checkpoint")
    ranks = Ranks.of(model)
    if ranks is None:
        return _put_into(model, solution, on_excess)
    with ranks.told_of_errors():
        export = _put_into(model, solution, on_excess)
        words = json.dumps(checkpoints_of(model))
        try:
            ranks.agree({"the exported plan": hashlib.sha256(words.encode()).hexdigest()[:12]})
        except RanksDisagreeError:
            export.remove()
            raise
    return export


def _put_into(model: nn.Module, solution: Solution, on_excess: str) -> Export:
    check_exportable(model, solution, call="to_torch_checkpoint")
    assert solution.simulation is not None
    own, budget_bytes = solution.simulation, solution.request.available_bytes
    plan_compared = "the plan itself"
    if solution.graph.host_state_bytes:  # no part of what is exported
        solution = replace(solution, graph=with_state_on_device(solution.graph))
    if solution.graph.meta.rewrites:  # checkpointed modules run PyTorch's own step
        plan_compared = "a plan of single operators without rewrites"
        solution = _without_rewrites(solution, or_least=on_excess == "least")
    try:
        plan = by_module(
            solution,
            module_tree(model, solution.graph),
            may_save=may_save(solution.graph),
            extra_bytes=extra_bytes(solution.graph),
        )
    except NoModulesFitError as error:
        if on_excess == "error":
            raise _nothing_fits(model, solution, error) from None
        plan = error.least
    _put(model, solution.graph, plan)
    return Export(
        modules=tuple(_exported(plan.regions, plan)),
        schedule=plan.schedule,
        peak_bytes=plan.peak_bytes,
        time_s=plan.simulation.time_s,
        planned_peak_bytes=own.peak_bytes,
        planned_time_s=own.time_s,
        baseline_time_s=solution.baseline.time_s,
        budget_bytes=budget_bytes,
        lost=tuple(_lost(solution, plan, compared=plan_compared)),
        sharded=sharding_words(solution.environment),
        _model=model,
    )


def _without_rewrites(solution: Solution, *, or_least: bool) -> Solution:
    """A plan of the plain step for the same request. or_least: or else for its minimum budget."""
    try:
        plain = without_rewrites(solution)
    except NoPlainStepError as error:
        raise ExportError(str(error)) from None
    if plain.schedule is None and or_least and plain.minimum_budget_bytes is not None:
        request = replace(plain.request, budget_bytes=plain.minimum_budget_bytes)
        plain = answer(plain.plain, request)
    if plain.schedule is None:
        raise ExportError(
            "the plan rewrites the step, which checkpointing modules cannot, and without rewrites "
            f"nothing fits {format_size(plain.request.available_bytes)}{plain.obstacle_text}; "
            'give more, or on_excess="least"'
        )
    return plain


def _nothing_fits(model: nn.Module, solution: Solution, error: NoModulesFitError) -> ExportError:
    assert solution.simulation is not None
    least_bytes = error.least.peak_bytes
    finer = f"apply(model, solution) keeps to {solution.simulation.peak_bytes} bytes; or "
    if words := sharding_words(solution.environment):
        finer = f"these are bytes {words}; "
    return ExportError(
        f"the budget is {solution.request.available_bytes} bytes, and checkpointing modules of "
        f"{type(model).__name__} takes at least {least_bytes}: PyTorch recomputes modules as a "
        f"whole, and no operators called outside of them. {finer}solve with a budget "
        f'of {least_bytes} bytes, or give on_excess="least"'
    )


def check_exportable(model: nn.Module, solution: Solution, *, call: str) -> None:
    """Raise ExportError for a solution without a schedule, and for a model that has a plan or is
    not the planned one; TypeError for a file. call: the function that exports."""
    if not isinstance(solution, Solution):
        raise TypeError(
            f"{call}() was given a {type(solution).__name__} as the plan; give the Solution of "
            "solve(model, batch, ...): a file does not hold the graph that it needs"
        )
    if solution.schedule is None or solution.simulation is None:
        raise ExportError(
            f"the solution has no schedule to export: its status is {solution.status}"
            f"{solution.obstacle_text}"
        )
    graph = solution.graph
    modules = dict(model.named_modules())
    for path, module in modules.items():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PlannedForward):
            raise ExportError("a plan is applied to this model already; remove(model) it first")
        if isinstance(forward, ExportedForward):
            raise ExportError(
                f"a plan is exported to this model already (module {path!r}); remove() it first"
            )
    if caching_configs(model):
        raise ExportError(
            f"config.use_cache of {type(model).__name__} is on: blocks that are recomputed would "
            "fill the cache a second time, and the plan is for a step without it; set "
            "model.config.use_cache = False"
        )
    if not graph.meta.parameters:
        raise ExportError(
            "the solution was made for a graph file that no module was traced into; export needs "
            "one from solve(model, batch, ...)"
        )
    missing = sorted(set(graph.meta.parameters) ^ dict(model.named_parameters()).keys())
    missing += sorted({n.module for n in graph.forward_nodes if n.module not in modules})
    if missing:
        raise ExportError(
            f"the solution was made for a {graph.meta.model or 'model'} that differs from "
            f"this {type(model).__name__} in {missing[0]!r}; export to the module that was given "
            "to solve, before it is wrapped by anything else"
        )


def module_tree(model: nn.Module, graph: Graph) -> ModuleTree:
    """The modules that may be checkpointed, of those that the step calls.

    The blocks are the members of the outermost lists and sequences of modules; where a model has
    none, its children. A module with a parallel style of its own is left to those around it: what
    the style gathers and reduces is outside of its forward.
    """
    styled = {path for path, module in model.named_modules() if has_parallel_style(module)}
    first: dict[str, int] = {}  # path -> position of the first operator in it
    for position, node in enumerate(graph.forward_nodes):
        for path in itertools.accumulate(node.module.split("."), "{}.{}".format):
            first.setdefault(path, position)

    def parts_of(path: str) -> tuple[str, ...]:
        return tuple(p for p in called_children(model, path) if p in first and p not in styled)

    listed = [path for path in listed_blocks(model) if path in first and path not in styled]
    blocks = listed or list(parts_of(""))
    blocks.sort(key=first.__getitem__)
    parts = {block: parts_of(block) for block in blocks}
    parts |= {part: parts_of(part) for inside in parts.values() for part in inside}
    around = [
        path
        for path, module in model.named_modules()
        if path and path not in blocks and path not in styled and not is_container(module)
        if any(is_under(block, path) for block in blocks)
    ]
    # the nearest to the blocks: recomputing those further out would be almost the whole step
    nearest = [p for p in around if not any(o != p and is_under(o, p) for o in around)]
    return ModuleTree(blocks=tuple(blocks), parts=parts, around=tuple(nearest))


def _put(model: nn.Module, graph: Graph, plan: RegionPlan) -> None:
    # a node without outputs writes: into the buffers that the forward pass changes
    written = {n for node in graph.forward_nodes if not node.outputs for n in node.inputs}
    changed = sorted(path for path, tensor in graph.meta.buffers.items() if tensor in written)
    layout = RegionLayout(graph, plan.regions)
    for region in (inside for top in plan.regions for inside in top.flat()):
        module = model.get_submodule(region.path)
        module.forward = CheckpointedForward(
            module,
            saved=saved_calls(layout, region) if region.saved else None,
            changed_buffers=names_inside(changed, region.path),
        )


def _exported(
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
        yield from _exported(region.inner, plan, (*inside, region.path))


def _lost(solution: Solution, plan: RegionPlan, *, compared: str) -> Iterator[str]:
    """compared: what the solution's plan is called."""
    assert solution.schedule is not None
    assert solution.simulation is not None
    slower_s = plan.simulation.time_s - solution.simulation.time_s
    if slower_s > 0:
        share = 100 * slower_s / (solution.baseline.time_s or 1.0)
        yield f"the step takes {share:.2f} % longer than with {compared}"
    inside = {name for region in plan.regions for name in region.nodes}
    n_runs = Counter(solution.schedule.order)
    outside = [name for name, n in n_runs.items() if n > 1 and name not in inside]
    if outside:
        one = len(outside) == 1
        yield (
            f"{counted(len(outside), 'operator')} that {compared} recomputes "
            f"{'is' if one else 'are'} in no checkpointed module and {'stays' if one else 'stay'} "
            f"saved ({', '.join(outside[:3])}{', ...' if len(outside) > 3 else ''})"
        )
    if plan.refused:
        path, reason = next(iter(plan.refused.items()))
        modules = counted(len(plan.refused), "module")
        yield f"{modules} cannot be checkpointed alone; {path}: {reason}"


__all__ = [
    "Export",
    "ExportError",
    "ExportedModule",
    "module_tree",
    "remove_torch_checkpoint",
    "to_torch_checkpoint",
]
