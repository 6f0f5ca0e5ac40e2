"""`verify`, which checks a plan from Python as `solve --verify` does from the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, optim

from graphs.graph import warn
from graphs.host_state import optimizer_of
from graphs.training_step import GivenOptimizer, check_parameters, read_optimizer, without_state
from scheduler_runtime.verifying.both_steps import run_both_steps
from solver.reporting import Verification
from solver.schedule import Solution
from solver.sizes_deadlines_progress import names_checked, tell, telling


@names_checked
def verify(
    solution: Solution,
    *,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    device: str = "cpu",
    autocast: str | None = None,
) -> Verification:
    """Run the step with and without the plan on this machine, and compare peaks, times and results.

    solution: the plan, from `solve`.
    model, batch: functions that create them, so that both runs start from the same state.
    loss, inputs: as in `solve`.
    optimizer: as in `solve`; an instance must be over the parameters of `model()`, and its state is
        not changed. None: the optimizer class that was planned, with its default options, or no
        optimizer if none was planned.
    device: where the steps run, such as "cpu" or "cuda".
    autocast: "bf16", "fp16" or None.

    Returns the measurements and the verdict, `.passed`. Needs as much memory as the step takes
    without the plan. Warns if a measured peak exceeds the budget although the predicted one does
    not, or if it differs notably from the predicted one (`.warnings`).

    Raises TypeError if `solution` is not a Solution, or `model` or `batch` not a function;
    ValueError if the solution has no plan or has one for another model; RuntimeError or MemoryError
    if the step cannot be run on this machine.
    """
    if not isinstance(solution, Solution):
        raise TypeError(
            f"solution is an object of type {type(solution).__name__}; give what solve returned, "
            "or Solution.load(schedule, graph=graph)"
        )
    for name, value in (("model", model), ("batch", batch)):
        is_module = hasattr(value, "parameters") and not isinstance(value, type)
        if not callable(value) or is_module:
            raise TypeError(
                f"{name} is an object of type {type(value).__name__}; give a function that creates "
                f"it ({name}=lambda: ...), as both runs start from the same state"
            )
    name = solution.graph.meta.model or "graph"
    with telling(f"verifying the plan of {name}...") as say:
        found = run_both_steps(
            solution,
            model=model,
            batch=batch,
            loss=loss,
            inputs=inputs,
            optimizer=_optimizer_maker(optimizer or optimizer_of(solution.environment).get("name")),
            device=device,
            autocast=autocast,
            say=lambda what: say(f"verifying the plan of {name}: {what}"),
        )
    tell(f"{name}: {found.line}")
    for line in (*found.memory_failures, *found.warnings):
        warn(line)
    return found


def _optimizer_maker(given: GivenOptimizer | None) -> Callable[[nn.Module], optim.Optimizer | None]:
    """A function that creates a new optimizer of a model, as given to `solve` (None: no optimizer).

    It raises the errors of `solve` for an optimizer that cannot be used.
    """

    def make(model: nn.Module) -> optim.Optimizer | None:
        if given is None:
            return None
        optimizer = read_optimizer(given, model)
        check_parameters(optimizer, model)
        return without_state(optimizer)

    return make
