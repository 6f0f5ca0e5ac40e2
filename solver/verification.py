"""What `--verify` found: one training step run both ways beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from solver.solution import Solution

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


VERIFIER = "scheduler_runtime.verify"
"""The module whose `verify` runs a step both ways.

Imports go one way: solver must not import scheduler_runtime. The command and the functions of
`solver.show` are the outermost layer, which puts the parts together; they live in solver because
they must start without torch, which scheduler_runtime imports. So they find the verifier by this
name, and speak to it through the protocol `Verifier`.
"""


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
    """Runs the step both ways; scheduler_runtime.verify has the only one.

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
