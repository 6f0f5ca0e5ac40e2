"""Replanning for a call that differs from the planned one, within the same budget."""

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
    """Plan the module's new graph, with the loss and the optimizer of the old plan."""
    if plan.environment.get("loss") == "outside":
        graph = _with_planned_loss(graph, plan, reason)
    logger.warning("replanning, because this call differs from the plan: %s", reason)
    solution = answer(with_optimizer(graph, plan.environment.get("optimizer")), plan.request)
    if solution.schedule is None:
        raise ReplanError(
            f"{reason}, and no schedule for it fits {plan.request.available_bytes} bytes "
            f"({solution.status}){solution.obstacle_text}"
        )
    logger.warning("replanned in %.2f s: %r", solution.solve_time_s, solution)
    return solution.schedule


def _with_planned_loss(graph: Graph, plan: Plan, reason: str) -> Graph:
    """The module's new graph around the planned loss, an upper bound for a smaller batch.

    A loss outside cannot be traced from the module. Where the module returns the same tensors and
    none of them is larger, the planned loss is counted; so the plan holds for every loss that does
    not take more memory when its inputs get smaller.
    """
    remedy = (
        "the loss is computed outside of the model, so the step cannot be planned from the model "
        "alone: solve with the new batch and apply(model, [plan, other_plan]), or plan for the "
        "largest batch first"
    )
    if plan.graph is None:
        raise ReplanError(f"{reason}; a schedule file does not contain the loss, and {remedy}")
    planned = plan.graph
    outside = tuple(node for node in planned.nodes if node.phase == "outside")
    made = {name for node in outside for name in node.outputs}
    read = {name for node in outside for name in node.inputs} - made
    returned = {name for node in planned.forward_nodes for name in node.outputs} & read
    tangents = {tensor.name for tensor in graph.tensors if tensor.kind == "tangent"}
    received = {t.name for t in planned.tensors if t.kind == "tangent"} & made
    known = graph.tensor_by_name
    grown = [
        name
        for name in sorted(returned | received)
        if name not in known or known[name].size_bytes > planned.tensor_by_name[name].size_bytes
    ]
    if grown or tangents != received or not returned <= set(graph.outputs):
        raise ReplanError(f"{reason}; {remedy}")
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
