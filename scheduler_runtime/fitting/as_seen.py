"""Update the figures of a plan by what its first step has shown; the schedule stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphs.graph import Graph
from graphs.training_step import with_dropped_outputs, with_loss_bytes
from scheduler_runtime.fitting.loss_outside import LossBytes
from solver.schedule import Schedule, Solution, simulate, simulate_unplanned


def with_loss(solution: Solution, loss: LossBytes) -> Solution:
    """The solution, for a loss outside of the model that takes this, not what was reserved."""

    def with_bytes(graph: Graph) -> Graph:
        return with_loss_bytes(graph, reserved_bytes=loss.reserved, held_bytes=loss.held)

    assert solution.schedule is not None
    assert solution.variants is not None
    graph = with_bytes(solution.graph)
    schedule = Schedule(solution.schedule.ops, graph.graph_id)
    plain = with_bytes(solution.variants.plain)
    return replace(
        solution,
        graph=graph,
        schedule=schedule,
        simulation=simulate(graph, schedule, places=solution.request.places),
        baseline=simulate_unplanned(plain),
        variants=replace(
            solution.variants,
            plain=plain,
            planned=tuple(map(with_bytes, solution.variants.planned)),
        ),
    )


def with_dropped(solution: Solution, names: Sequence[str]) -> Solution:
    """The solution, for a training that drops these outputs before its backward pass.

    That lowers the peak of the step without a plan. The plan itself still has room for the outputs,
    since a later step may hold them.

    names: the outputs' names in the graph.
    """
    assert solution.variants is not None
    plain = with_dropped_outputs(solution.variants.plain, names)
    variants = replace(solution.variants, plain=plain)
    return replace(solution, baseline=simulate_unplanned(plain), variants=variants)
