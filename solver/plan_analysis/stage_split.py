"""How to divide a model's layers into the stages of a pipeline, each planned within one budget.

    split = split_pipeline(layers, x, target=y, loss=F.cross_entropy, budget="16GB",
                           n_stages=4, n_microbatches=8, optimizer=torch.optim.AdamW)
    split.sizes        # (3, 5, 5, 3): layers by stage
    split.solutions    # the plan of each

The slowest stage sets the pace of a pipeline, and what a stage takes depends on what its plan must
recompute. `solver.plan_analysis.divisions` finds the best division; this file plans its stages.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from graphs.graph import Graph
from graphs.pipeline import Pipeline, PipelineError, at_place
from graphs.rewrites import Variants, check_word
from solver.methods import METHODS
from solver.plan_analysis.divisions import Part, StageTime, best_division, equal_parts
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    check_names,
    counted,
    format_percent,
    format_size,
    format_time,
    telling,
)
from solver.solving import (
    as_step,
    attempt,
    check_options,
    explained,
    request_for,
    traced_for_device,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graphs.costs import CostModel
    from graphs.hardware import Hardware
    from graphs.layers import Layer, StageOf


_OF_ONE_STAGE = {"inputs", "pipeline", "fsdp"}
"""Options of a trace that are not those of all stages."""


@dataclass(frozen=True)
class PipelineSplit:
    """A division of layers into stages, and the plans of these.

    sizes: the number of layers of each stage.
    solutions: by stage. Where no division fits: of the equal division, whose solutions say why.
    lower_bound_s: no division is faster in its slowest stage, with whatever plans (inf: none fits).
    equal: the equal division, planned for comparison.
    n_divisions: those that were compared.
    n_plans: stages that were planned, those of the equal division among them; the others are
        slower even without recomputation, or equal to one that was planned.

    Seconds are those of the forward and backward pass of one micro-batch.
    """

    sizes: tuple[int, ...]
    solutions: tuple[Solution, ...]
    lower_bound_s: float
    equal: tuple[Solution, ...]
    n_divisions: int
    n_plans: int

    @property
    def fits(self) -> bool:
        """Whether each stage has a plan."""
        return all(solution.simulation is not None for solution in self.solutions)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The layers of each stage."""
        ends = [sum(self.sizes[:i]) for i in range(len(self.sizes) + 1)]
        return tuple(slice(first, end) for first, end in pairwise(ends))

    @property
    def times_s(self) -> tuple[float | None, ...]:
        """Seconds of each stage (None: nothing fits)."""
        return tuple(map(micro_batch_s, self.solutions))

    @property
    def slowest_s(self) -> float | None:
        """Seconds of the slowest stage; None: nothing fits."""
        return _slowest_s(self.solutions)

    @property
    def equal_slowest_s(self) -> float | None:
        """Seconds of the slowest stage of the equal division; None: it does not fit."""
        return _slowest_s(self.equal)

    @property
    def gap(self) -> float | None:
        """What is not proven, as a share of the slowest stage's time; None: nothing fits."""
        if self.slowest_s is None:
            return None
        slower_s = self.slowest_s - self.lower_bound_s
        return max(0.0, slower_s / self.slowest_s) if self.slowest_s else 0.0

    def __repr__(self) -> str:
        """One line: what was found, what is proven, and the equal division beside it."""
        budget = format_size(self.solutions[0].request.budget_bytes)
        asked = f"{len(self.sizes)} stages, budget {budget}"
        compared = f"of {counted(self.n_divisions, 'division')}, {counted(self.n_plans, 'plan')}"
        if self.slowest_s is None:
            proven = " (proven)" if math.isinf(self.lower_bound_s) else ""
            return f"PipelineSplit({asked}: nothing fits{proven}, {compared})"
        equal_s = self.equal_slowest_s
        equal = "does not fit" if equal_s is None else format_time(equal_s)
        return (
            f"PipelineSplit({asked}: {'+'.join(map(str, self.sizes))} layers, slowest stage "
            f"{format_time(self.slowest_s)}, proven within {format_percent(self.gap or 0.0)}; "
            f"equal division {equal}; {compared})"
        )


def micro_batch_s(solution: Solution) -> float | None:
    """Seconds of the forward and backward pass of a stage's plan; None without one."""
    if solution.simulation is None:
        return None
    return solution.simulation.time_s - _optimizer_s(solution.graph)


def split_pipeline(
    layers: Iterable[nn.Module],
    micro_batch: Any,
    *,
    n_stages: int,
    n_microbatches: int,
    budget: int | float | str,
    schedule: str = "1f1b",
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    stage_of: StageOf | None = None,
    reserve: int | float | str | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    capacity_bytes: int | None = None,
    rewrites: str | None = None,
    on_stage: Callable[[str], None] | None = None,
    **trace_options: Any,
) -> PipelineSplit:
    """Divide layers into stages so that the slowest one, as planned within `budget`, is fastest.

    layers: in their order; what one returns is what the next is called with. A stage is a run of
        them with at least one parameter. Layers that share a parameter are put into one stage.
    micro_batch: what the first layer is called with, as for `solve`; meta tensors will do.
    n_stages, n_microbatches, schedule: as for `Pipeline`; "1f1b" or "gpipe".
    budget: bytes of each rank.
    target, loss: the loss is loss(output of the last layer, target), as the schedules of
        `torch.distributed.pipelining` call it. loss None: the last layer returns the loss.
    stage_of: makes the module of a stage of its layers (default: `nn.Sequential`).
    time_limit_s: of the plan of one stage.
    on_stage: told in words of each stage before it is planned.

    The rest is as for `solve`: optimizer, device, costs, and so on. An optimizer is given as its
    class, its name or a function, since each stage has its own.

    Equal layers are traced once, and planned once for each place. What is proven of the division:
    every other one has a stage that takes as long by the bound of its plan, or by its layers'
    operators alone.

    Raises ValueError for invalid options, PipelineError where the layers cannot be so divided,
    TraceError for a layer that cannot be traced.
    """
    from graphs.trace import trace

    check_options(
        method=method, time_limit_s=time_limit_s, budget=budget, capacity_bytes=capacity_bytes
    )
    own, of_trace = (inspect.signature(f).parameters for f in (split_pipeline, trace))
    check_names("split_pipeline", trace_options, [*own, *(of_trace.keys() - _OF_ONE_STAGE)])
    if schedule == "interleaved":
        raise PipelineError(
            "schedule='interleaved' puts several stages on one rank, whose plans share a budget: "
            "divide the layers yourself and solve for each stage, or use '1f1b' or 'gpipe'"
        )
    places = [Pipeline(stage, n_stages, n_microbatches, schedule) for stage in range(n_stages)]
    layers = list(layers)
    if len(layers) < n_stages:
        raise PipelineError(
            f"{counted(len(layers), 'layer')} cannot be divided into {n_stages} stages; give the "
            "model's layers one by one"
        )
    if rewrites is not None:
        trace_options["rewrites"] = check_word(rewrites)
    request = {
        "budget": budget,
        "reserve": reserve,
        "capacity_bytes": capacity_bytes,
        "rewrites": rewrites,
        "method": method,
        "time_limit_s": time_limit_s,
        "seed": seed,
    }
    with telling(f"tracing {counted(len(layers), 'layer')}...") as say:
        stages = _Stages(
            layers, micro_batch, places, stage_of, target, loss, trace_options, request
        )
        found = best_division(
            len(layers),
            n_stages,
            bound_s=stages.bound_s,
            plan=lambda part: stages.time(part, on_stage or say),
        )
        equal = tuple(map(stages.solution, equal_parts(len(layers), n_stages)))
    solutions = equal if found.parts is None else tuple(map(stages.solution, found.parts))
    parts = found.parts or equal_parts(len(layers), n_stages)
    return PipelineSplit(
        sizes=tuple(part.end - part.first for part in parts),
        solutions=solutions,
        lower_bound_s=found.lower_bound_s,
        equal=equal,
        n_divisions=math.comb(len(layers) - 1, n_stages - 1),
        n_plans=stages.n_plans,
    )


_TracedStage: TypeAlias = "tuple[Variants, Hardware | None, CostModel | None]"


class _Stages:
    """The stages that layers can be divided into, each planned when it is asked for."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        micro_batch: Any,
        places: Sequence[Pipeline],
        stage_of: StageOf | None,
        target: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        trace_options: dict[str, Any],
        request: dict[str, Any],
    ) -> None:
        from torch import nn

        from graphs.layers import read_layers

        self._modules, self._places = layers, places
        self._stage_of = stage_of or (lambda layers: nn.Sequential(*layers))
        self._target, self._loss = target, loss
        self._trace_options, self._request = trace_options, request
        self._plans: dict[Hashable, Solution] = {}
        self._steps: dict[Hashable, _TracedStage] = {}
        of_device = {k: v for k, v in trace_options.items() if k in ("device", "costs")}
        self._layers: tuple[Layer, ...]
        self._layers, _, _ = traced_for_device(
            nn.ModuleList(layers),
            of_device,
            lambda **options: read_layers(layers, micro_batch, stage_of=self._stage_of, **options),
        )
        self._check()

    @property
    def n_plans(self) -> int:
        return len(self._plans)

    def bound_s(self, part: Part) -> float:
        """Seconds that the layers' own operators take; inf: these layers cannot be a stage."""
        if not self._can_be_stage(part.first, part.end, is_first=part.stage == 0):
            return math.inf
        return math.fsum(layer.least_s for layer in self._layers[part.first : part.end])

    def time(self, part: Part, say: Callable[[str], None]) -> StageTime:
        say(
            f"planning stage {part.stage} of {len(self._places)} with "
            f"{counted(part.end - part.first, 'layer')}..."
        )
        solution = self.solution(part)
        steps_s = _optimizer_s(solution.graph)
        found_s = micro_batch_s(solution)
        return StageTime(
            plan_s=math.inf if found_s is None else found_s,
            lower_bound_s=math.inf
            if solution.proven_infeasible
            else solution.lower_bound_s - steps_s,
        )

    def solution(self, part: Part) -> Solution:
        """The plan of a stage; that of an equal one, if there is one already."""
        place = self._places[part.stage]
        key = place.is_first, place.is_last, place.n_in_flight, self._forms_of(part)
        if key not in self._plans:
            self._plans[key] = self._planned(part)
        return _at(place, self._plans[key])

    def _planned(self, part: Part) -> Solution:
        place = self._places[part.stage]
        traced, hardware, costs = self._traced(part)
        step = Variants(
            at_place(traced.plain, place), tuple(at_place(each, place) for each in traced.planned)
        )
        request = request_for(step.plain, hardware, costs, is_module=True, **self._request)
        found = attempt(step, request)
        if found.proven_infeasible or not METHODS[found.method].reaches_least_budget:
            return found
        return explained(found)

    def _traced(self, part: Part) -> _TracedStage:
        """The step of these layers; at which place but the first or last they stand is the same."""
        place, options = self._places[part.stage], dict(self._trace_options)
        key = place.is_first, place.is_last, self._forms_of(part)
        if key in self._steps:
            return self._steps[key]
        module = self._stage_of(self._modules[part.first : part.end])
        batch = self._layers[part.first].inputs
        if place.is_last and self._loss is not None:
            loss, batch = self._loss, (batch, self._target)
            options["inputs"] = lambda pair: pair[0]
            options["loss"] = lambda output, pair: loss(output, pair[1])
        self._steps[key] = as_step(module, batch, {**options, "pipeline": place}, others=())
        return self._steps[key]

    def _forms_of(self, part: Part) -> tuple[Hashable, ...]:
        return tuple(layer.form for layer in self._layers[part.first : part.end])

    def _check(self) -> None:
        """Raise PipelineError where no division has stages that can be some."""
        n_layers, n_stages = len(self._layers), len(self._places)
        ends = {0}  # where a stage can end, after as many stages
        for stage in range(n_stages):
            ends = {
                end
                for first in ends
                for end in range(first + 1, n_layers + 1)
                if self._can_be_stage(first, end, is_first=stage == 0)
            }
        if n_layers not in ends:
            n_with = sum(bool(layer.parameters) for layer in self._layers)
            raise PipelineError(
                f"{n_layers} layers cannot be divided into {n_stages} stages: each stage needs "
                f"parameters, which {n_with} of the layers have, the first one trained ones, and "
                "layers that share a parameter stay together"
            )

    def _can_be_stage(self, first: int, end: int, *, is_first: bool) -> bool:
        inside = self._layers[first:end]
        outside = (*self._layers[:first], *self._layers[end:])
        own = frozenset[int]().union(*(layer.parameters for layer in inside))
        if not own or any(own & layer.parameters for layer in outside):
            return False
        return not is_first or inside[-1].gives_gradient


def _optimizer_s(graph: Graph) -> float:
    return math.fsum(node.time_s for node in graph.nodes if node.phase == "optimizer")


def _slowest_s(solutions: Sequence[Solution]) -> float | None:
    times = [micro_batch_s(solution) for solution in solutions]
    found = [time_s for time_s in times if time_s is not None]
    return max(found) if len(found) == len(times) else None


def _at(place: Pipeline, solution: Solution) -> Solution:
    """The plan of an equal stage at another place of the pipeline."""

    def moved(graph: Graph) -> Graph:
        meta = graph.meta.with_environment(pipeline=dataclasses.asdict(place))
        return dataclasses.replace(graph, meta=meta)

    steps = Variants.of(solution.variants or solution.graph)
    # Without the traced program, which is that of the module that was planned.
    variants = Variants(moved(steps.plain), tuple(map(moved, steps.planned)))
    return dataclasses.replace(solution, graph=moved(solution.graph), variants=variants)
