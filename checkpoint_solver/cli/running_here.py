"""Run the model on this machine: to verify a plan, or to plan a model that cannot be traced.

These are the two places where the command runs real training steps. They import
`scheduler_runtime`, and with it torch, only when they are called.
"""

from __future__ import annotations

from checkpoint_solver.cli.memory_to_run import estimate_memory
from checkpoint_solver.cli.model_file import ModelFile
from checkpoint_solver.cli.model_source import LoadError, error_text
from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.reading_arguments import Arguments
from checkpoint_solver.cli.traced_step import NotTracedError
from solver.device_and_costs import Target
from solver.reporting import Verification
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import Say, counted

N_REAL_STEPS = 11
"""How many steps `plan_chain` runs if the measured memory of its first plan is as predicted."""


class VerifyError(ValueError):
    """The step cannot be run here with and without the plan; the message says why."""


def verify_plan(
    file: ModelFile, target: Target, autocast: str | None, solution: Solution, say: Say
) -> Verification:
    """Run the step with and without the plan. Raises LoadError for an error in the model file, and
    VerifyError if the step fails."""
    from scheduler_runtime.verifying import run_both_steps

    device = target.local_device
    try:
        return run_both_steps(solution, **file.functions, device=device, autocast=autocast, say=say)
    except LoadError:
        raise
    except (ValueError, RuntimeError, MemoryError) as error:
        raise VerifyError(error_text(error, file.source)) from error


def plan_by_submodules(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    request: Request,
    refused: NotTracedError,
    progress: Progress,
) -> tuple[Solution, tuple[str, ...]]:
    """Measure real steps and plan by whole submodules; returns the plan and notes for the report.

    refused: the error that says why the model cannot be traced.

    Raises LoadError, with `refused` as its cause, if planning by submodules is not possible either.
    """
    names = ["rewrites", "compare", "autocast", "accumulate", "fsdp", "tensor", "emit", "passes"]
    names += ["max_batch", "max_seq", "host", "disk", "budget_of"]
    names += ["method"] if arguments.method != "auto" else []
    names += ["costs"] if arguments.costs == "roofline" else []
    names += ["device"] if target.is_absent else []
    given = arguments.given_flags(*names)
    if given:
        raise LoadError(
            f"{refused}; leave out {given}, and the command plans the model by its submodules"
        ) from refused
    run = estimate_memory(refused.sizes, target.local_device, with_gradients=True)
    if not run.fits:
        raise LoadError(
            f"{refused.why}; real steps, to plan it by whole submodules, do not fit here: {run}"
        ) from refused
    progress.write_line(
        f"not traced: {refused.why}. Running at least {N_REAL_STEPS} real steps of "
        f"the model here, to plan it by whole submodules ({run})"
    )
    from scheduler_runtime.fallback import FallbackError

    try:
        return _measure_and_plan(file, target.local_device, request)
    except FallbackError as error:
        raise LoadError(f"{refused}; planning by submodules failed: {error}") from error
    except (Exception, SystemExit) as error:  # the code of the model may raise anything
        raise refused from error


def _measure_and_plan(
    file: ModelFile, device: str, request: Request
) -> tuple[Solution, tuple[str, ...]]:
    from graphs.model_calls import nested
    from scheduler_runtime.fallback import plan_chain

    model = file.model().to(device)
    batch = nested.map_tensors(lambda tensor: tensor.to(device), file.batch())
    solution = plan_chain(
        model,
        batch,
        budget=request.budget_bytes,
        reserve=request.reserve_bytes,
        loss=file.loss,
        inputs=file.inputs,
        optimizer=file.optimizer(model),
        time_limit_s=request.time_limit_s,
    )
    n_blocks = counted(len(solution.blocks), "submodule")
    summary = f"Planned by submodules, measured in eager mode: {n_blocks}."
    notes = [summary, *solution.parts, *solution.left_alone]
    if solution.schedule is not None:
        notes.append(
            "This schedule cannot be run from a file: in the training script, call "
            "apply(model, checkpoint_solver.fallback.plan_chain(model, batch, budget=...))."
        )
    return solution, tuple(note[:1].upper() + note[1:] for note in notes)
