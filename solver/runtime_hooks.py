"""The one place where solver reaches scheduler_runtime: verifying a plan, planning by submodules.

Imports go one way, `scheduler_runtime → solver → graphs`. The command and the functions of
`solver.reporting` still have to run a model, and they live in solver because they must start
without torch. So they find the runtime here, by name and only when it is needed, and speak to it
through the protocols below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from solver.schedule import Solution

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


def load_verifier() -> Verifier:
    """What runs a step both ways, with the plan and without. Imports torch."""
    verifier: Verifier = importlib.import_module("scheduler_runtime.verifying").verify
    return verifier


def load_submodule_planner() -> SubmodulePlanner:
    """What plans a model that cannot be traced. Imports torch."""
    module = importlib.import_module("scheduler_runtime.fallback")
    planner: SubmodulePlanner = module.planned_for_command
    return planner


PLAN_BY_SUBMODULES = (
    "to plan by submodules: scheduler_runtime.fallback.plan_chain(model, batch, budget=...)"
)
"""Added to a TraceError of a model that runs."""


class VerifyError(ValueError):
    """The step cannot be run both ways here; says why."""


@dataclass(frozen=True)
class Verification:
    """The measured step with the plan (and without), on the device that it ran on.

    available_bytes: what the plan may take. differences: what is not bit for bit the same with
    the plan as without, in words ("gradient of head.weight"); empty: all of it is. unsteady: names
    of what differs from run to run without a plan as well, on which nothing can be said.
    reserved_bytes: what CUDA's allocator took from the device with the plan; context_bytes: what
    was taken of it beside that, by contexts, kernels and other processes (None on the CPU).
    Times are medians of n_timed_steps, of which the slowest and fastest were spread_s apart.
    """

    device: str
    available_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    baseline_predicted_peak_bytes: int
    baseline_measured_peak_bytes: int
    predicted_time_s: float
    measured_time_s: float
    baseline_predicted_time_s: float
    baseline_measured_time_s: float
    n_gradients: int
    differences: tuple[str, ...]
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    spread_s: float = 0.0
    n_timed_steps: int = 1
    unsteady: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.measured_peak_bytes <= self.available_bytes

    @property
    def passed(self) -> bool:
        return self.fits and not self.differences


class Verifier(Protocol):
    """Runs the step both ways; scheduler_runtime.verifying has the only one.

    model, batch, optimizer: make them anew, for real. Raises ValueError for a plan that does not
    fit the model; RuntimeError and MemoryError for a step that cannot be run here.
    """

    def __call__(
        self,
        solution: Solution,
        *,
        model: Callable[[], nn.Module],
        batch: Callable[[], Any],
        loss: Callable[[Any, Any], Tensor] | None,
        inputs: Callable[[Any], Any] | None,
        optimizer: Callable[[nn.Module], optim.Optimizer],
        device: str,
        autocast: str | None,
    ) -> Verification: ...


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
