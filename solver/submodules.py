"""The command `solve` on a model that the tracer refuses: planned by its submodules, in real steps.

The step runs on this machine, with a real model, so only what can be measured here is planned so.
The planner itself is in scheduler_runtime and is handed in by the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from solver.solution import Solution

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

PLANNER = "scheduler_runtime.fallback"
"""The module whose `planned_for_command` is the one there is, found by name like
`solver.verification.VERIFIER`."""


class NoRowError(ValueError):
    """The model cannot be planned by submodules either; says why."""


@dataclass(frozen=True)
class Planned:
    """notes: whole sentences: which submodules are planned how, and how to run the plan."""

    solution: Solution
    notes: tuple[str, ...]


class SubmodulePlanner(Protocol):
    """Watches real steps and plans them; `scheduler_runtime.fallback` has the only one.

    model, batch, optimizer: make them anew, for real. Raises NoRowError where there is no row of
    submodules; whatever the model's own code raises.
    """

    def __call__(
        self,
        *,
        model: Callable[[], nn.Module],
        batch: Callable[[], Any],
        loss: Callable[[Any, Any], Tensor] | None,
        inputs: Callable[[Any], Any] | None,
        optimizer: Callable[[nn.Module], optim.Optimizer],
        device: str,
        budget_bytes: int,
        reserve_bytes: int,
        time_limit_s: float,
    ) -> Planned: ...
