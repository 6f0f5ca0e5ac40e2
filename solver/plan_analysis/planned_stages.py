"""The pipeline stages that a model's layers can be divided into, traced and planned on demand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from graphs.graph import Graph
from graphs.pipeline import Pipeline, PipelineError, moved_to_stage
from graphs.rewrites import Variants
from solver.methods import METHODS
from solver.plan_analysis.divisions import Part, StageTime
from solver.schedule import Solution
from solver.sizes_deadlines_progress import counted
from solver.solving import as_step, attempt, request_for, traced_for_device, with_obstacle

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graphs.costs import CostModel
    from graphs.hardware import Hardware
    from graphs.trace import Layer, StageOf


def micro_batch_s(solution: Solution) -> float | None:
    """Seconds of one micro-batch's forward and backward pass in a stage's plan (None: no plan)."""
    if solution.simulation is None:
        return None
    return solution.simulation.time_s - optimizer_s(solution.graph)


_TracedStage: TypeAlias = "tuple[Variants, Hardware | None, CostModel | None]"


class PlannedStages:
    """The stages of a sequence of layers, for one number of pipeline stages at a time.

    Equal runs of layers are traced once, and planned once for each kind of place in the pipeline
    (first, last, micro-batches in flight), even across different numbers of stages.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        micro_batch: Any,
        place: Pipeline,
        stage_of: StageOf | None,
        target: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        trace_options: dict[str, Any],
        request: dict[str, Any],
        quick: bool,
    ) -> None:
        """Trace each layer by itself; `solver.plan_analysis.split_pipeline` lists the parameters.

        place: any stage of a pipeline with the schedule and number of micro-batches.
        """
        from torch import nn

        from graphs.trace import read_layers

        self._modules = layers
        self._places: tuple[Pipeline, ...] = (place,)
        self._stage_of = stage_of or (lambda layers: nn.Sequential(*layers))
        self._target, self._loss = target, loss
        self._trace_options, self._request, self._quick = trace_options, request, quick
        self._plans: dict[Hashable, Solution] = {}
        self._steps: dict[Hashable, _TracedStage] = {}
        device_options = {k: v for k, v in trace_options.items() if k in ("device", "costs")}
        self._layers: tuple[Layer, ...]
        self._layers, _, _ = traced_for_device(
            nn.ModuleList(layers),
            device_options,
            lambda **options: read_layers(layers, micro_batch, stage_of=self._stage_of, **options),
        )

    def divide_into(self, n_stages: int) -> None:
        """Set the number of stages that the layers are divided into.

        Raises PipelineError if no division of the layers gives valid stages.
        """
        first = self._places[0]
        self._places = tuple(
            dataclasses.replace(first, stage=stage, n_stages=n_stages) for stage in range(n_stages)
        )
        self._check_divisible()

    @property
    def n_layers(self) -> int:
        return len(self._layers)

    @property
    def n_plans(self) -> int:
        return len(self._plans)

    def bound_s(self, part: Part) -> float:
        """Seconds that the layers' operators take without recomputation (inf: these layers cannot
        be a stage)."""
        if not self._can_be_stage(part.first, part.end, is_first=part.stage == 0):
            return math.inf
        return math.fsum(layer.least_s for layer in self._layers[part.first : part.end])

    def time(self, part: Part, say: Callable[[str], None]) -> StageTime:
        """Plan a stage and return its time without the optimizer. say: takes a progress message."""
        say(
            f"planning stage {part.stage} of {len(self._places)} with "
            f"{counted(part.end - part.first, 'layer')}..."
        )
        solution = self.solution(part)
        optimizer_time_s = optimizer_s(solution.graph)
        plan_time_s = micro_batch_s(solution)
        return StageTime(
            plan_s=math.inf if plan_time_s is None else plan_time_s,
            lower_bound_s=math.inf
            if solution.proven_infeasible
            else solution.lower_bound_s - optimizer_time_s,
        )

    def solution(self, part: Part) -> Solution:
        """The plan of a stage; an equal stage that was planned before is reused."""
        place = self._places[part.stage]
        key = place.is_first, place.is_last, place.n_in_flight, self._forms_of(part)
        if key not in self._plans:
            self._plans[key] = self._plan_stage(part)
        return _moved_to(place, self._plans[key])

    def _plan_stage(self, part: Part) -> Solution:
        """Trace and plan a stage. If no plan is found, but it is not proven that there is none,
        search for the least budget too."""
        place = self._places[part.stage]
        traced, hardware, costs = self._trace_stage(part)
        step = Variants(
            moved_to_stage(traced.plain, place),
            tuple(moved_to_stage(each, place) for each in traced.planned),
        )
        request = request_for(step.plain, hardware, costs, is_module=True, **self._request)
        found = attempt(step, request, quick=self._quick)
        if found.proven_infeasible or not METHODS[found.method].reaches_least_budget:
            return found
        return with_obstacle(found)

    def _trace_stage(self, part: Part) -> _TracedStage:
        """Trace the step of a stage. The trace depends on the place in the pipeline only by whether
        the stage is the first or the last."""
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
        """The forms of the stage's layers; layers with the same form have the same step."""
        return tuple(layer.form for layer in self._layers[part.first : part.end])

    def _check_divisible(self) -> None:
        """Raise PipelineError if no division of the layers gives valid stages."""
        n_layers, n_stages = len(self._layers), len(self._places)
        ends = {0}  # the layers before which the next stage can begin
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
                f"{n_layers} layers cannot be divided into {n_stages} stages: each stage needs a "
                f"layer with parameters (there are {n_with}), the first stage needs trained "
                "parameters, and layers that share a parameter stay together"
            )

    def _can_be_stage(self, first: int, end: int, *, is_first: bool) -> bool:
        """Whether layers first .. end - 1 have parameters, share none with other layers, and, as
        the first stage, pass on a gradient."""
        inside = self._layers[first:end]
        outside = (*self._layers[:first], *self._layers[end:])
        own = frozenset[int]().union(*(layer.parameters for layer in inside))
        if not own or any(own & layer.parameters for layer in outside):
            return False
        return not is_first or inside[-1].gives_gradient


def optimizer_s(graph: Graph) -> float:
    """Seconds of the optimizer's nodes."""
    return math.fsum(node.time_s for node in graph.nodes if node.phase == "optimizer")


def _moved_to(place: Pipeline, solution: Solution) -> Solution:
    """The plan of an equal stage, moved to another place of the pipeline."""

    def moved(graph: Graph) -> Graph:
        meta = graph.meta.with_environment(pipeline=dataclasses.asdict(place))
        return dataclasses.replace(graph, meta=meta)

    steps = solution.step
    # Leave out the traced program: it belongs to the module that was planned.
    variants = Variants(moved(steps.plain), tuple(map(moved, steps.planned)))
    return dataclasses.replace(solution, graph=moved(solution.graph), variants=variants)
