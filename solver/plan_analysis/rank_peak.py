"""The peak of a rank that runs several stages of a pipeline, from their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphs.graph import Graph
from graphs.pipeline import OF_EACH_STAGE, Pipeline, PipelineError, is_of_other_stages, pipeline_of
from solver.schedule import Schedule, Simulation, Solution, n_before_optimizer


def rank_peak_bytes(solutions: Sequence[Solution]) -> int:
    """Bytes that one rank holds at most, with these plans for its stages.

    Each plan takes the rank's other stages to be like its own. Here the rank holds the parameters,
    gradients and optimizer state of each, and what else stands beside the step of the stage that
    has most of it. In a pass of one of them it holds what its step takes, and what the plan of each
    stage saves of those micro-batches that are in flight then (`Pipeline.passes`). In the
    optimizer's step it holds what that takes for all stages together. For stages that are alike,
    but for the optimizer, this is the peak of each.

    solutions: of all stages of one rank. Only `schedule="interleaved"` has several.

    Raises PipelineError for stages of several ranks, a stage too few, and one without a plan.
    """
    place = check_rank(solutions)
    stages: list[StageBytes] = []
    for solution in in_order(solutions):
        if solution.schedule is None or solution.simulation is None:
            rank = place.stage % place.n_ranks
            raise PipelineError(f"a stage of rank {rank} has no plan: {solution}")
        stages.append(StageBytes.of(solution.graph, solution.schedule, solution.simulation))
    return peak_of(place, stages)


@dataclass(frozen=True)
class StageBytes:
    """What a stage of a rank takes with its plan.

    own: what each stage has of its own all the time, by kind. beside: what else is resident, by
    name and kind; of the rank's stages the one counts that has most.
    saved_bytes: of each of its micro-batches in flight.
    step_bytes: of the step of one, the optimizer's left out. optimizer_bytes: of the optimizer's.
    """

    own: Mapping[str, int]
    beside: Mapping[str, int]
    saved_bytes: int
    step_bytes: int
    optimizer_bytes: int

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, simulation: Simulation) -> StageBytes:
        """simulation: of the schedule, with all those in flight."""
        own, beside = resident_by_kind(graph)
        saved_bytes, n_before = simulation.saved_bytes, n_before_optimizer(graph, schedule)
        before, after = simulation.live_bytes[:n_before], simulation.live_bytes[n_before:]
        others_bytes = (graph.n_in_flight - 1) * saved_bytes
        return cls(
            own=own,
            beside=beside,
            saved_bytes=saved_bytes,
            step_bytes=max(before) - graph.resident_bytes - others_bytes,
            optimizer_bytes=max(after, default=graph.resident_bytes) - graph.resident_bytes,
        )


def peak_of(place: Pipeline, stages: Sequence[StageBytes]) -> int:
    """`rank_peak_bytes` of the stages of a rank, in their order."""
    saved_bytes = [stage.saved_bytes for stage in stages]
    passes_bytes = max(
        stages[local].step_bytes + held_in_flight(others, saved_bytes)
        for local, others in place.passes
    )
    optimizer_bytes = sum(stage.optimizer_bytes for stage in stages)
    return resident_bytes(stages) + max(passes_bytes, optimizer_bytes)


def resident_bytes(stages: Sequence[StageBytes]) -> int:
    """Of a rank, all the time."""
    own_bytes = sum(sum(stage.own.values()) for stage in stages)
    most: Counter[str] = Counter()
    for stage in stages:
        most |= Counter(stage.beside)
    return own_bytes + most.total()


def held_in_flight(others: Sequence[int], saved_bytes: Sequence[int]) -> int:
    """Of so many micro-batches of each stage."""
    return sum(n * each for n, each in zip(others, saved_bytes, strict=True))


def resident_by_kind(graph: Graph) -> tuple[Counter[str], Counter[str]]:
    """Bytes of what each stage has of its own, by kind; and of what else stands beside its step, by
    name and by kind."""
    own: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    for tensor in graph.resident:
        if tensor.alias_of is not None or is_of_other_stages(tensor.name):
            continue
        if tensor.kind in OF_EACH_STAGE and not tensor.name.startswith("pipeline."):
            of_device = tensor.name in graph.meta.device_bytes
            (beside if of_device else own)[tensor.kind] += tensor.size_bytes
        else:
            name = tensor.name if tensor.name.startswith("pipeline.") else tensor.kind
            beside[name] += tensor.size_bytes
    return own, beside


def in_order(solutions: Sequence[Solution]) -> list[Solution]:
    """The stages of a rank in the order of the pipeline."""
    return sorted(solutions, key=lambda solution: _place(solution).stage)


def check_rank(solutions: Sequence[Solution]) -> Pipeline:
    """The place of one of these stages. Raises PipelineError where they are not those of a rank."""
    if not solutions:
        raise PipelineError("give the solutions of the stages of one rank, made with pipeline=")
    places = [_place(solution) for solution in solutions]
    first = places[0]
    stages = sorted(place.stage for place in places)
    rank = first.stage % first.n_ranks
    of_rank = list(range(rank, first.n_stages, first.n_ranks))
    if stages != of_rank or any(replace(place, stage=first.stage) != first for place in places):
        words = ", ".join(place.words for place in places)
        raise PipelineError(f"rank {rank} has the stages {of_rank}, but the plans are for {words}")
    return first


def _place(solution: Solution) -> Pipeline:
    place = pipeline_of(solution.environment)
    if place is None:
        raise PipelineError("give the solutions of the stages of one rank, made with pipeline=")
    return place
