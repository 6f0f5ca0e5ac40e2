"""The part of a step's schedule that the module runs."""

from __future__ import annotations

from graphs.graph import Graph
from solver.schedule import Compute, Free, Op, Schedule, name_in


def module_schedule(schedule: Schedule, part: Graph) -> Schedule:
    """The part of the schedule that the module runs, without the ops of the caller: those of a loss
    outside and of the optimizer, and the frees of the module's outputs."""
    runs = _ModuleOps(part)
    return Schedule(ops=tuple(filter(runs, schedule.ops)), graph_id=part.graph_id)


def n_ops_before_loss(schedule: Schedule, part: Graph) -> int:
    """How many ops of `module_schedule` come before the caller computes its loss.

    Later copies must wait for the backward pass: the loss needs the memory."""
    runs, n_ops = _ModuleOps(part), 0
    for op in schedule.ops:
        if isinstance(op, Compute) and not runs(op):
            break
        n_ops += runs(op)
    return n_ops


class _ModuleOps:
    """Says of each op whether the module runs it."""

    def __init__(self, part: Graph) -> None:
        self._part = part
        self._freed = set(part.producer).difference(part.returned)

    def __call__(self, op: Op) -> bool:
        if isinstance(op, Compute):
            return op.node in self._part.node_by_name
        return name_in(op) in (self._freed if isinstance(op, Free) else self._part.producer)
