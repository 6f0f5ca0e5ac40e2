"""What the command does with a model that the tracer refuses: it plans by submodules."""

from __future__ import annotations

from solver.cli.arguments import Arguments
from solver.cli.model_file import LoadError, ModelFile
from solver.device import Target
from solver.runtime_hooks import NoRowError, Planned, SubmodulePlanner


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
        f"--device {arguments.device} (it is not here)": target.hardware.kind != target.kind,
        "--costs": arguments.costs == "roofline",
        "--autocast": arguments.autocast is not None,
        "--accumulate": arguments.accumulate,
        "--fsdp": arguments.n_ranks is not None,
        "--method, --compare": arguments.methods != ("auto",),
        "--emit": arguments.emit is not None,
        "--max-batch": arguments.largest == "batch_size",
        "--max-seq": arguments.largest == "seq_length",
    }
    return ", ".join(option for option, given in asked.items() if given)
