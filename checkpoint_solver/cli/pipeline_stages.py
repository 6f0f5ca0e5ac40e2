"""`--pipeline`: divide the layers of a model file into stages, and choose the one to report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from checkpoint_solver.cli.arguments import Arguments
from checkpoint_solver.cli.model_file import ModelFile
from checkpoint_solver.cli.model_source import LoadError
from checkpoint_solver.cli.traced_step import (
    batch_with_values,
    build_on_meta,
    in_autocast,
    naming_options,
    sharding_of,
)
from checkpoint_solver.cli.usage import UsageError
from graphs.pipeline import pipeline_of
from solver.device_and_costs import Target
from solver.plan_analysis import PipelineSplit, split_pipeline
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import counted, format_size, format_time


def split_stages(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    request: Request,
    *,
    notes: list[str],
    on_stage: Callable[[str], None] | None = None,
    quick: bool = False,
) -> PipelineSplit:
    """Divide the layers of the file's `nn.Sequential` into stages, and plan the stages.

    notes: sentences for the report are added to it.
    on_stage: called with a line about each stage before it is planned.
    quick: plan with a fraction of the search effort.

    Raises UsageError if the layers cannot be divided as asked, LoadError for an error in the model
    file.
    """
    import torch
    from torch import nn

    from graphs.trace import TraceError

    assert arguments.pipeline is not None
    assert arguments.microbatches is not None
    model = build_on_meta(file.model, "the model", notes)
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"--pipeline {arguments.pipeline}: {file.source.factory} of {file.source} returned a "
            f"{type(model).__name__}; it must return the layers as a torch.nn.Sequential (name "
            "another function with model.py:function)"
        )
    batch = batch_with_values(file, target.local_device, notes)

    def optimizer(module: Any) -> Any:
        if not isinstance(module, nn.Module):
            raise TypeError("of a module")  # it is called with the parameters first
        return file.optimizer(module)

    n_stages = arguments.pipeline
    try:
        with (
            naming_options(arguments),
            in_autocast(arguments.autocast, target.local_device),
        ):
            return split_pipeline(
                model,
                batch if file.inputs is None else file.inputs(batch),
                target=batch,
                loss=file.loss,
                n_stages=n_stages if isinstance(n_stages, int) else range(1, len(model) + 1),
                n_microbatches=arguments.microbatches,
                schedule=arguments.schedule,
                budget=request.budget_bytes,
                reserve=request.reserve_bytes,
                method=arguments.methods[0],
                time_limit_s=arguments.time_limit,
                quick=quick,
                seed=arguments.seed,
                rewrites=arguments.rewrites,
                optimizer=optimizer,
                device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                costs=arguments.costs,
                fsdp=sharding_of(arguments),
                on_stage=on_stage,
            )
    except TraceError as error:
        raise LoadError(f"{file.source}: {error}") from error


def reported_stage(split: PipelineSplit, wanted: int | None) -> int:
    """The stage to report: `wanted` if given, else one that does not fit, else the slowest."""
    if wanted is not None:
        return wanted
    times = [float("inf") if time_s is None else time_s for time_s in split.times_s]
    return times.index(max(times))


def failing_stage(arguments: Arguments, solution: Solution) -> str:
    """Which stage has no plan, for an error message: " of stage 0"; "" if it is not a stage."""
    place = pipeline_of(solution.graph.meta.environment)
    if place is None:
        return ""
    # All stages of a division that fits have plans, so this stage is of the equal division, which
    # is reported if none fits.
    division = "" if arguments.pipeline is None else " of the equal division"
    return f" of stage {place.stage}{division}"


def stage_notes(split: PipelineSplit, stage: int) -> Iterator[str]:
    """Sentences for the report: the times and peaks of all stages, and what is proven of other
    divisions."""
    sizes, n_layers = "+".join(map(str, split.sizes)), sum(split.sizes)
    this, another = f"This is stage {stage}", "--stage reports another stage"
    if split.before:
        proven = all(math.isinf(each.lower_bound_s) for each in split.before)
        numbers = ", ".join(str(len(each.sizes)) for each in split.before)
        fits = "fits (proven)" if proven else "was found to fit"
        yield f"No division into fewer stages ({numbers}) {fits}."
    if split.slowest_s is None:
        yield (
            f"No fitting division was found among {counted(split.n_divisions, 'division')} of "
            f"{n_layers} layers into {len(split.sizes)} stages. {this} of the equal division "
            f"({sizes}); {another}."
        )
        place = pipeline_of(split.solutions[stage].environment)
        is_cap = place is not None and place.n_microbatches == len(split.sizes) < n_layers
        if split.before and is_cap and place is not None and place.schedule == "1f1b":
            yield (
                "Under 1F1B there are at most as many stages as micro-batches; more micro-batches "
                "allow more stages."
            )
        return
    equal_s = split.equal_slowest_s
    equal = "does not fit" if equal_s is None else f"takes {format_time(equal_s)}"
    times = ", ".join(format_time(time_s or 0.0) for time_s in split.times_s)
    peaks = ", ".join(
        format_size(each.simulation.peak_bytes) for each in split.solutions if each.simulation
    )
    yield (
        f"The stages of {sizes} layers take {times} per micro-batch and peak at {peaks}. "
        f"{this}; {another}."
    )
    yield (
        f"No division has a slowest stage faster than {format_time(split.lower_bound_s)} "
        f"({counted(split.n_divisions, 'division')} compared); the equal one {equal}."
    )
