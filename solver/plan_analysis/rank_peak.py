"""The peak of a rank that runs several stages of a pipeline, from their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphs.graph import Graph
from graphs.pipeline import OF_EACH_STAGE, Pipeline, PipelineError, is_of_other_stages, pipeline_of
from solver.schedule import Solution


def rank_peak_bytes(solutions: Sequence[Solution]) -> int:
    """Bytes that one rank holds at most, with these plans for its stages.

    Each plan takes the rank's other stages to be like its own. Here the rank holds the parameters,
    gradients and optimizer state of each, and what else stands beside the step of the stage that
    has most of it. In a pass of one of them it holds what its step takes, and what the plan of each
    stage saves of those micro-batches that are in flight then (`Pipeline.passes`). For stages that
    are alike this is the peak of each.

    solutions: of all stages of one rank. Only `schedule="interleaved"` has several.

    Raises PipelineError for stages of several ranks, a stage too few, and one without a plan.
    """
    place = check_rank(solutions)
    by_stage = sorted(solutions, key=lambda solution: _place(solution).stage)
    of_each: Counter[str] = Counter()
    most: Counter[str] = Counter()
    saved_bytes: list[int] = []
    step_bytes: list[int] = []
    for solution in by_stage:
        graph, found = solution.graph, solution.simulation
        if found is None:
            rank = place.stage % place.n_ranks
            raise PipelineError(f"a stage of rank {rank} has no plan: {solution}")
        own, beside = _resident(graph)
        of_each += own
        most |= beside
        others_bytes = (graph.n_in_flight - 1) * found.saved_bytes
        saved_bytes.append(found.saved_bytes)
        step_bytes.append(found.peak_bytes - graph.resident_bytes - others_bytes)
    taken_bytes = max(
        step_bytes[local] + sum(n * each for n, each in zip(others, saved_bytes, strict=True))
        for local, others in place.passes
    )
    return of_each.total() + most.total() + taken_bytes


def _resident(graph: Graph) -> tuple[Counter[str], Counter[str]]:
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
