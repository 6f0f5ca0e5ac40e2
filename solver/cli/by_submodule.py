"""Planning by submodules, for a model that cannot be traced."""

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
    """Raises LoadError with `refused` and why planning by submodules is not possible either."""
    names = ["compare", "autocast", "accumulate", "fsdp", "emit", "max_batch", "max_seq"]
    names += ["method"] if arguments.method != "auto" else []
    names += ["costs"] if arguments.costs == "roofline" else []
    names += ["device"] if target.hardware.kind != target.kind else []  # not on this machine
    given = arguments.given(*names)
    if given:
        raise LoadError(f"{refused}; the command does so without {given}") from refused
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
            time_limit_s=arguments.time_limit,
        )
    except (Exception, SystemExit) as error:  # the code of the model may raise anything
        if isinstance(error, NoRowError):
            raise LoadError(f"{refused}; tried, and failed: {error}") from error
        raise refused from error
