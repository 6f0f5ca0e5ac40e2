"""A new plan for a call that differs from the planned one, within the same budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from graphs.graph import Graph
from graphs.step import with_optimizer
from solver.schedule import Schedule
from solver.solution import Request
from solver.solve import answer

logger = logging.getLogger(__name__)


class ReplanError(ValueError):
    """No plan could be made for the new call; says why."""


def replan(graph: Graph, request: Request, environment: Mapping[str, Any], reason: str) -> Schedule:
    """Plan the module's graph anew, with the optimizer that the plan knew of."""
    if environment.get("loss") == "outside":
        raise ReplanError(
            f"{reason}; the loss is computed outside of the model, so the step cannot be planned "
            "from the model alone: call solve again with the new batch"
        )
    logger.warning("planning anew, since this call differs from the plan: %s", reason)
    solution = answer(with_optimizer(graph, environment.get("optimizer")), request)
    if solution.schedule is None:
        needed = (
            ""
            if solution.obstacle is None
            else (
                f"; at least {solution.obstacle.proven_bytes} bytes are needed at "
                f"{solution.obstacle.op}"
            )
        )
        raise ReplanError(
            f"{reason}, and nothing fits {request.available_bytes} bytes there "
            f"({solution.status}){needed}"
        )
    logger.warning("planned in %.2f s: %r", solution.solve_time_s, solution)
    return solution.schedule
