"""The peak of a rank that runs several stages of a pipeline, from their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphs.pipeline import PipelineError, pipeline_of
from solver.schedule import Solution


def rank_peak_bytes(solutions: Sequence[Solution]) -> int:
    """Bytes that one rank holds at most, with these plans for its stages.

    Each plan takes the rank's other stages to be like its own. Where they differ, the rank may hold
    what the largest has resident, (micro-batches in flight - 1) times the most that one saves, and
    the most that one's step takes besides. For stages that are alike this is the peak of each.

    solutions: of all stages of one rank. Only `schedule="interleaved"` has several.

    Raises PipelineError for stages of several ranks, a stage too few, and one without a plan.
    """
    _check(solutions)
    resident: Counter[str] = Counter()
    most_saved_bytes = most_step_bytes = 0
    for solution in solutions:
        graph, found = solution.graph, solution.simulation
        assert found is not None
        here: Counter[str] = Counter()  # by the name of what stands beside the step, and by kind
        for tensor in graph.resident:
            if tensor.alias_of is None:
                is_beside = tensor.name.startswith("pipeline.")
                here[tensor.name if is_beside else tensor.kind] += tensor.size_bytes
        resident |= here
        others_bytes = (graph.n_in_flight - 1) * found.saved_bytes
        most_saved_bytes = max(most_saved_bytes, others_bytes)
        step_bytes = found.peak_bytes - graph.resident_bytes - others_bytes
        most_step_bytes = max(most_step_bytes, step_bytes)
    return sum(resident.values()) + most_saved_bytes + most_step_bytes


def _check(solutions: Sequence[Solution]) -> None:
    places = [pipeline_of(solution.environment) for solution in solutions]
    first = places[0] if places else None
    if first is None or None in places:
        raise PipelineError("give the solutions of the stages of one rank, made with pipeline=")
    stages = sorted(place.stage for place in places if place is not None)
    rank = first.stage % first.n_ranks
    of_rank = list(range(rank, first.n_stages, first.n_ranks))
    if stages != of_rank or any(
        place is not None and replace(place, stage=first.stage) != first for place in places
    ):
        words = ", ".join(place.words for place in places if place is not None)
        raise PipelineError(
            f"the stages of rank {rank} are {of_rank}, and the plans are for {words}"
        )
    for solution in solutions:
        if solution.simulation is None:
            raise PipelineError(f"a stage of rank {rank} has no plan: {solution}")
