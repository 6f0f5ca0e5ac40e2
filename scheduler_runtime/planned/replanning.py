"""A new plan for a call that differs from the planned one, within the same budget."""

from __future__ import annotations

import dataclasses
import logging

from graphs.graph import Graph
from graphs.training_step import with_optimizer
from scheduler_runtime.planned.plan import Plan
from solver.schedule import Schedule
from solver.solving import answer

logger = logging.getLogger(__name__)


class ReplanError(ValueError):
    """No plan could be made for the new call; says why."""


def replan(graph: Graph, plan: Plan, reason: str) -> Schedule:
    """Plan the module's graph anew, with the loss and the optimizer that the plan knew of."""
    if plan.environment.get("loss") == "outside":
        graph = _with_planned_loss(graph, plan, reason)
    logger.warning("planning anew, since this call differs from the plan: %s", reason)
    solution = answer(with_optimizer(graph, plan.environment.get("optimizer")), plan.request)
    if solution.schedule is None:
        raise ReplanError(
            f"{reason}, and nothing fits {plan.request.available_bytes} bytes there "
            f"({solution.status}){solution.obstacle_text}"
        )
    logger.warning("planned in %.2f s: %r", solution.solve_time_s, solution)
    return solution.schedule


def _with_planned_loss(graph: Graph, plan: Plan, reason: str) -> Graph:
    """The module's new graph around the planned loss, which takes no more for a smaller batch.

    What the caller computes cannot be traced from the module. Where the module returns the same
    tensors and none of them is larger, the loss is counted as it was planned; so the plan holds
    for every loss that does not take more memory when its inputs get smaller.
    """
    way_out = (
        "the loss is computed outside of the model, so the step cannot be planned from the model "
        "alone: call solve with the new batch and apply(model, [plan, another plan]), or plan for "
        "the largest batch first"
    )
    if plan.graph is None:
        raise ReplanError(f"{reason}; a schedule file does not hold the loss, and {way_out}")
    planned = plan.graph
    outside = tuple(node for node in planned.nodes if node.phase == "outside")
    made = {name for node in outside for name in node.outputs}
    read = {name for node in outside for name in node.inputs} - made
    returned = {name for node in planned.forward_nodes for name in node.outputs} & read
    tangents = {tensor.name for tensor in graph.tensors if tensor.kind == "tangent"}
    handed_back = {t.name for t in planned.tensors if t.kind == "tangent"} & made
    known = graph.tensor_by_name
    grown = [
        name
        for name in sorted(returned | handed_back)
        if name not in known or known[name].size_bytes > planned.tensor_by_name[name].size_bytes
    ]
    if grown or tangents != handed_back or not returned <= set(graph.outputs):
        raise ReplanError(f"{reason}; {way_out}")
    extra = tuple(
        tensor
        for tensor in planned.tensors
        if tensor.name in made | read and tensor.name not in known
    )
    losses = tuple(name for name in planned.outputs if name in made)
    return dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, *outside, *graph.later_nodes),
        tensors=(*graph.tensors, *extra),
        outputs=tuple(dict.fromkeys((*graph.outputs, *losses))),
    )
