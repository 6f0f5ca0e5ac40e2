"""The command `solve` on a model that the tracer refuses: planned by its submodules, in real steps.

The step runs on this machine, with a real model, so only what can be measured here is planned so.
The planner itself is in scheduler_runtime and is handed in by the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from solver.arguments import Arguments
from solver.model_file import LoadError, ModelFile
from solver.solution import Solution
from solver.target import Target

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


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


def plan_by_submodules(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    *,
    refused: LoadError,
    planner: SubmodulePlanner,
    budget_bytes: int,
    reserve_bytes: int,
) -> Planned:
    """Raises LoadError: `refused`, and why this way is not open either."""
    why = _not_measurable(arguments, target)
    if why:
        raise LoadError(f"{refused}; the command does so without {why}") from refused
    try:
        return planner(
            model=file.model,
            batch=file.batch,
            loss=file.loss,
            inputs=file.inputs,
            optimizer=file.optimizer,
            device=target.torch_device,
            budget_bytes=budget_bytes,
            reserve_bytes=reserve_bytes,
            time_limit_s=arguments.time_limit_s,
        )
    except (Exception, SystemExit) as error:  # the model's own code ran: it may raise anything
        if isinstance(error, NoRowError):
            raise LoadError(f"{refused}; tried here: {error}") from error
        raise refused from error


def _not_measurable(arguments: Arguments, target: Target) -> str:
    """The options that ask for what real steps on this machine cannot say; "": none does."""
    asked = {
        f"--device {arguments.device} (it is not here)": target.hardware.kind
        != target.torch_device,
        "--costs": arguments.costs == "roofline",
        "--autocast": arguments.autocast is not None,
        "--accumulate": arguments.accumulate,
        "--method, --compare": arguments.methods != ("auto",),
        "--emit": arguments.emit is not None,
        "--max-batch": arguments.largest == "batch_size",
        "--max-seq": arguments.largest == "seq_length",
    }
    return ", ".join(option for option, given in asked.items() if given)
