"""Plan again for a call that differs from the planned one, within the same budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from graphs.graph import Graph
from graphs.passes import passes_of, with_passes
from graphs.pipeline import pipeline_of, with_pipeline
from graphs.rewrites import variants_of
from graphs.trace import CapturedStep
from graphs.training_step import with_optimizer
from graphs.zero import with_zero
from scheduler_runtime.planned.plan import Plan
from scheduler_runtime.planned.planning import NewPlan, new_plan
from solver.methods import KnownPlan
from solver.sizes_deadlines_progress import format_both


class ReplanError(ValueError):
    """No plan could be made for the new call; the message says why."""


def replan(
    step: CapturedStep, plan: Plan, reason: str, *, known: Sequence[KnownPlan]
) -> tuple[CapturedStep, NewPlan]:
    """Plan the module's new step, with the loss and the optimizer of the old plan.

    As in `solve`, all variants that the request allows are planned, unless a known plan can be
    reused. The optimizer's state stays where it is, on the host or the device.

    step: the step, traced for the new call.
    reason: how the call differs, for errors.
    known: plans of the same module for other calls.

    Returns the step with the rewrites of the new plan, and the plan. Raises ReplanError.
    """
    where = "host" if plan.state_buckets else "device"
    found = new_plan(
        step,
        lambda graph: _with_surroundings(graph, plan, reason),
        dataclasses.replace(plan.request, optimizer_state=where),
        # also the old plan's own variant, which the request may not name
        planned=tuple(dict.fromkeys([*variants_of(plan.request.rewrites), plan.rewrites])),
        known=known,
    )
    solution = found.solution
    if solution.schedule is None:
        raise ReplanError(
            f"{reason}, and no schedule for it fits {format_both(plan.request.available_bytes)} "
            f"({solution.status}){solution.obstacle_text}"
        )
    return step.with_rewrites(solution.graph.meta.rewrites), found


def _with_surroundings(graph: Graph, plan: Plan, reason: str) -> Graph:
    """The module's graph with the loss, the optimizer, the pipeline and the passes of the old plan.

    Other passes in flight may still run with the old plan, so each is counted with at least the
    bytes that it saves."""
    environment = plan.environment
    if environment.get("loss") == "outside":
        graph = _with_planned_loss(graph, plan.loss, reason)
    graph = with_zero(graph, environment.get("zero"))
    graph = with_optimizer(graph, environment.get("optimizer"))
    graph = with_pipeline(graph, pipeline_of(environment))
    return with_passes(graph, passes_of(environment), others_bytes=plan.saved_bytes)


def _with_planned_loss(graph: Graph, loss: Graph | None, reason: str) -> Graph:
    """Put the old plan's loss into the module's new graph.

    A loss outside of the module cannot be traced again. If the module returns as many tensors as
    planned and none is larger, the planned loss is an upper bound, and the new plan is right for
    every loss that does not take more memory with smaller inputs. Else raises ReplanError.
    """
    remedy = (
        "the loss is computed outside of the model, so the step cannot be planned from the model "
        "alone: solve with the new batch and apply(model, [plan, other_plan]), or plan for the "
        "largest batch first"
    )
    if loss is None:
        raise ReplanError(f"{reason}; this schedule file does not contain the loss, and {remedy}")
    received = {t.name for t in loss.tensors if t.kind == "tangent" and t.name in loss.producer}
    tangents = {tensor.name for tensor in graph.tensors if tensor.kind == "tangent"}
    returned = [name for name in loss.outputs if name not in loss.producer]
    # planned name -> name in the new graph, of what the loss reads
    here = dict(zip(returned, graph.returned, strict=False))
    here |= {name: name for name in received}
    known = graph.tensor_by_name
    planned_bytes = {tensor.name: tensor.size_bytes for tensor in loss.tensors}
    is_same = len(returned) == len(graph.returned) and tangents == received
    if not is_same or any(known[new].size_bytes > planned_bytes[old] for old, new in here.items()):
        raise ReplanError(f"{reason}; {remedy}")
    nodes = (
        dataclasses.replace(node, inputs=tuple(here.get(name, name) for name in node.inputs))
        for node in loss.nodes
    )
    extra = (t for t in loss.tensors if t.name not in known and t.name not in here)
    losses = (name for name in loss.outputs if name in loss.producer)
    return dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, *nodes, *graph.later_nodes),
        tensors=(*graph.tensors, *extra),
        outputs=tuple(dict.fromkeys((*graph.outputs, *losses))),
    )
