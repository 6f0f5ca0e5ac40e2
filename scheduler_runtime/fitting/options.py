"""The options of `fit`, its error, and the plans that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from graphs.costs import CostModel
from graphs.training_step import ACCUMULATE, LOSS, GivenOptimizer
from solver.schedule import Solution
from solver.sizes_deadlines_progress import IN_PYTHON, Rates, format_both, format_size_up

Optimizers: TypeAlias = GivenOptimizer | Sequence[GivenOptimizer] | None


class FitError(ValueError):
    """No schedule fits the budget, or the module cannot be fitted as it is; says why."""


def nothing_fits(name: str, solution: Solution, *, runs_again: bool = False) -> FitError:
    """The error for a solution without a schedule.

    name: name of the model.
    runs_again: whether the step runs its forward pass again, since gradients arrived for other
        outputs than planned.
    """
    longer = ": raise time_limit_s=" if solution.status == "time_limit" else ""
    again = _RUNS_AGAIN if runs_again else ""
    gradients = _GRADIENTS_EXIST if solution.graph.meta.gradients == ACCUMULATE else ""
    return FitError(
        f"no schedule of {name}'s step fits {format_both(solution.request.available_bytes)} "
        f"({solution.status}{longer}){solution.obstacle_text}{again}{gradients}"
        f"{_what_helps(solution)}"
    )


def _what_helps(solution: Solution) -> str:
    """What the user can do, to append to "nothing fits"; "" if the step fits without a plan."""
    if solution.fits_without_plan:
        return ""
    request, least_bytes = solution.request, solution.minimum_budget_bytes
    larger = f'budget="{format_size_up(least_bytes)}"' if least_bytes else "a larger budget"
    remedies = [f"{larger} or more"]
    if LOSS in solution.graph.node_by_name:
        remedies.append("loss_reserve=, if the loss takes less than is counted for it")
    if request.places is None:
        remedies.append('copies to host memory (host_budget="64GB")')
    if request.rewrites == "bitwise":
        remedies.append(f"{IN_PYTHON.last_bits}, which may change last bits")
    remedies.append("a smaller batch")
    return f". What may help: {'; '.join(remedies)}. report(solve(...)) shows what takes the memory"


_RUNS_AGAIN = (
    ". This step holds two forward passes, because gradients reached other outputs than planned; a "
    "minimum budget named above is for this step alone. Name the outputs that the loss is computed "
    "from, and one forward pass is enough: fit(..., loss_outputs=lambda output: (output.loss, "
    "output.hidden))"
)


_GRADIENTS_EXIST = (
    ". Gradients of an earlier backward pass exist while forward runs, and count: unless the step "
    "is to accumulate, call zero_grad() before the forward pass, not after it"
)


@dataclass(frozen=True)
class Fitted:
    """A plan that `fit` made.

    notes: sentences on what the plan counts and what it does not.
    reused: whether it was made without a search, by recomputing what an earlier plan recomputes.
    took_s: how long the step has waited for the plan, tracing included.
    """

    solution: Solution
    notes: tuple[str, ...]
    reused: bool = False
    took_s: float = 0.0

    def __str__(self) -> str:
        return "\n".join((repr(self.solution), *(f"note: {note}" for note in self.notes)))


@dataclass(frozen=True)
class Options:
    """The options of `fit`, whose docstring explains them."""

    budget: int | float | str
    reserve: int | float | str | None
    loss_reserve: int | float | str | None
    loss_outputs: Callable[[Any], Any] | None
    method: str
    time_limit_s: float
    seed: int
    costs: CostModel | None
    rewrites: str
    host_budget: int | float | str | None
    host_link: Rates | None
    disk_budget: int | float | str | None
    disk_rate: Rates | None
    optimizer_state: str
    on_pressure: str = "raise"
    passes: int | None = None
