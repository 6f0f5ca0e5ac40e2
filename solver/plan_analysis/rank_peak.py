"""The peak memory of a rank that runs several stages of a pipeline, from their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphs.graph import Graph
from graphs.pipeline import STAGE_KINDS, Pipeline, PipelineError, is_of_other_stages, pipeline_of
from solver.schedule import Schedule, Simulation, Solution, n_before_optimizer


def rank_peak_bytes(solutions: Sequence[Solution]) -> int:
    """The most bytes that one rank holds at once, with these plans for its stages.

    Each plan by itself assumes that the rank's other stages are like its own. Here their actual
    bytes are added up. The rank always holds the parameters, gradients and optimizer state of all
    its stages and, of each other kind of resident tensors, as much as the stage with the most.
    During a pass of one stage, it also holds what that pass takes and what each stage saves for the
    micro-batches in flight at that time (`Pipeline.passes`). During the optimizer's step, it holds
    what that takes for all stages together. If all stages are equal, this is the peak of each plan,
    except for the optimizer's step.

    solutions: one for each stage of the rank. Only `schedule="interleaved"` has several.

    Raises PipelineError if the stages are not exactly those of one rank, or one has no plan.
    """
    place = check_rank(solutions)
    stages: list[StageBytes] = []
    for solution in in_pipeline_order(solutions):
        if solution.schedule is None or solution.simulation is None:
            rank = place.stage % place.n_ranks
            raise PipelineError(f"a stage of rank {rank} has no plan: {solution}")
        stages.append(StageBytes.of(solution.graph, solution.schedule, solution.simulation))
    return peak_of(place, stages)


@dataclass(frozen=True)
class StageBytes:
    """The memory that one stage takes with its plan.

    own: kind -> resident bytes that every stage has for itself.
    shared: name or kind -> other resident bytes; for each, the stage with the most counts.
    saved_bytes: saved for backward by each of its micro-batches in flight.
    step_bytes: peak of one forward and backward pass, without resident tensors and other
        micro-batches.
    optimizer_bytes: peak of the optimizer's step, without resident tensors.
    """

    own: Mapping[str, int]
    shared: Mapping[str, int]
    saved_bytes: int
    step_bytes: int
    optimizer_bytes: int

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, simulation: Simulation) -> StageBytes:
        """simulation: of this schedule, with the other micro-batches in flight."""
        own, shared = resident_by_kind(graph)
        saved_bytes, n_before = simulation.saved_bytes, n_before_optimizer(graph, schedule)
        before, after = simulation.live_bytes[:n_before], simulation.live_bytes[n_before:]
        others_bytes = (graph.n_in_flight - 1) * saved_bytes
        return cls(
            own=own,
            shared=shared,
            saved_bytes=saved_bytes,
            step_bytes=max(before) - graph.resident_bytes - others_bytes,
            optimizer_bytes=max(after, default=graph.resident_bytes) - graph.resident_bytes,
        )


def peak_of(place: Pipeline, stages: Sequence[StageBytes]) -> int:
    """The peak of a rank with these stages, in the order of the pipeline (`rank_peak_bytes`)."""
    saved_bytes = [stage.saved_bytes for stage in stages]
    passes_bytes = max(
        stages[local].step_bytes + held_in_flight(others, saved_bytes)
        for local, others in place.passes
    )
    optimizer_bytes = sum(stage.optimizer_bytes for stage in stages)
    return resident_bytes(stages) + max(passes_bytes, optimizer_bytes)


def resident_bytes(stages: Sequence[StageBytes]) -> int:
    """Bytes that the rank holds during the whole step."""
    own_bytes = sum(sum(stage.own.values()) for stage in stages)
    most: Counter[str] = Counter()
    for stage in stages:
        most |= Counter(stage.shared)
    return own_bytes + most.total()


def held_in_flight(others: Sequence[int], saved_bytes: Sequence[int]) -> int:
    """Bytes that micro-batches in flight hold. others: how many of each stage. saved_bytes: of one
    micro-batch of each stage."""
    return sum(n * each for n, each in zip(others, saved_bytes, strict=True))


def resident_by_kind(graph: Graph) -> tuple[Counter[str], Counter[str]]:
    """Resident bytes that every stage has for itself, by kind, and the other ones, by name or kind
    (`StageBytes.own`, `StageBytes.shared`)."""
    own: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    for tensor in graph.resident:
        if tensor.alias_of is not None or is_of_other_stages(tensor.name):
            continue
        if tensor.kind in STAGE_KINDS and not tensor.name.startswith("pipeline."):
            of_device = tensor.name in graph.meta.device_bytes
            (shared if of_device else own)[tensor.kind] += tensor.size_bytes
        else:
            name = tensor.name if tensor.name.startswith("pipeline.") else tensor.kind
            shared[name] += tensor.size_bytes
    return own, shared


def in_pipeline_order(solutions: Sequence[Solution]) -> list[Solution]:
    """The stages of a rank in the order of the pipeline."""
    return sorted(solutions, key=lambda solution: _place(solution).stage)


def check_rank(solutions: Sequence[Solution]) -> Pipeline:
    """The place of the first of these stages. Raises PipelineError unless they are exactly the
    stages of one rank."""
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
