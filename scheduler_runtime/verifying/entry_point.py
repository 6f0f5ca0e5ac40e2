"""`verify`: a plan checked from Python, as `solve --verify` checks it from the command line."""

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
    """Run the step with and without the plan here, and compare peaks, times and every bit.

    model, batch: functions that create them.
    loss, inputs, optimizer: as in `solve`. One that is given must be of the parameters of
        `model()`; its own state is not changed. None: the planned class with its default options,
        or none where the plan counts none.
    autocast: "bf16", "fp16" or None.

    Needs the memory of the step without the plan. `.passed` of the result is the verdict. Warns
    where a measured peak is above the budget that was predicted to be within it, or is not the
    predicted one (`.warnings`).

    Raises TypeError for what is no Solution or no function; ValueError without a plan or for one of
    another model; RuntimeError, MemoryError if the step cannot be run here.
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
            optimizer=_maker(optimizer or optimizer_of(solution.environment).get("name")),
            device=device,
            autocast=autocast,
            say=lambda what: say(f"verifying the plan of {name}: {what}"),
        )
    tell(f"{name}: {found.line}")
    for line in (*found.memory_failures, *found.warnings):
        warn(line)
    return found


def _maker(given: GivenOptimizer | None) -> Callable[[nn.Module], optim.Optimizer | None]:
    """The function from a model to a new optimizer of it. Raises what `solve` raises, and names."""

    def made(model: nn.Module) -> optim.Optimizer | None:
        if given is None:
            return None
        optimizer = read_optimizer(given, model)
        check_parameters(optimizer, model)
        return without_state(optimizer)

    return made
