"""Turn the command line into a problem: a graph, a device and a budget.

A graph file is read. A model file is loaded, its model is built on the meta device so that no
weights are allocated, and one training step is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_solver.cli import hf_config
from checkpoint_solver.cli.arguments import STEP, Arguments
from checkpoint_solver.cli.model_file import SIZE_NAMES, ModelFile, open_model_file
from checkpoint_solver.cli.model_source import CONFIGURATION, LoadError, ModelSource, parse_source
from checkpoint_solver.cli.pipeline_stages import reported_stage, split_stages, stage_notes
from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.running_here import plan_by_submodules, verify_plan
from checkpoint_solver.cli.traced_step import ModelFailsError, NotTracedError, trace_step
from checkpoint_solver.cli.usage import UsageError
from graphs.files import FormatError
from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.rewrites import Variants
from solver.device_and_costs import (
    check_budget_of,
    check_step_allows,
    find_hardware,
    find_target,
    host_places,
)
from solver.plan_analysis import FIRST_SIZE, RETRY_SIZE
from solver.reporting import Verification, describe_costs, step_notes
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import OF_THE_COMMAND, Say, parse_budget
from solver.solving import with_disk

if TYPE_CHECKING:
    from graphs.costs import CostModel


NOTE_ON_ALLOCATOR = (
    "Train with PYTORCH_ALLOC_CONF=expandable_segments:True: without it the allocator loses more "
    "memory to fragmentation, which the reserve may not cover."
)


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    name, device, costs: text for the report.
    step: the variants of the traced step.
    request: the budget and limits for every method.
    reserve_reason: why a default reserve was chosen, for the report.
    notes: sentences for the report.
    verify: runs the model with and without the plan; its second argument is called with a line
        about what runs (None for a graph file).
    size: the batch size or sequence length of this problem, if one is maximized.
    resized: makes the problem at another size (None: no size is maximized).
    thorough: makes the same problem with the full search effort, if `planned` is a quick plan.
    planned: the plan, if there is one already: by submodules for a model that cannot be traced, or
        of a pipeline stage.
    stages: the plans of all stages of a pipeline, of which `planned` is one (empty with --stage).
    slowest_s: the time of the slowest pipeline stage per micro-batch (inf: a stage has no plan).
    not_traced: why the model cannot be traced ("": it was).
    """

    name: str
    step: Variants
    device: str
    costs: str
    request: Request
    reserve_reason: str = ""
    notes: tuple[str, ...] = ()
    verify: Callable[[Solution, Say], Verification] | None = None
    size: int | None = None
    resized: Callable[[int], Problem] | None = None
    thorough: Callable[[], Problem] | None = None
    planned: Solution | None = None
    stages: tuple[Solution, ...] = ()
    slowest_s: float = math.inf
    not_traced: str = ""

    @property
    def graph(self) -> Graph:
        """The graph of the step without rewrites."""
        return self.step.plain


@contextlib.contextmanager
def open_problem(arguments: Arguments, progress: Progress) -> Iterator[Problem]:
    """Load or trace the problem; inside the context a model file can import files beside it.

    Raises UsageError, BudgetError, SizeError, LoadError, FormatError.
    """
    is_configuration = arguments.problem.startswith(CONFIGURATION)
    if arguments.problem.endswith(".json") and not is_configuration:
        with progress.showing("reading the graph"):
            problem = _graph_problem(arguments)
        yield problem
        return
    source = parse_source(arguments.problem)
    if source is None:
        near = Path(f"{arguments.problem}.py")
        hint = f"; did you mean {near}?" if near.is_file() else ""
        raise LoadError(
            f"invalid problem {arguments.problem!r}: expected model.py[:function], "
            f"package.module[:function], hf:config.json or graph.json{hint}"
        )
    # Whatever a model file prints must stay out of the report and the JSON object.
    quiet = contextlib.redirect_stdout(sys.stderr)
    with quiet, _model_problem(arguments, source, progress) as problem:
        yield problem


def _graph_problem(arguments: Arguments) -> Problem:
    of_step = {
        option.name
        for option in dataclasses.fields(arguments)
        if option.metadata.get("group") == STEP
    }
    for_planning = {"device", "rewrites"}
    if given := arguments.given_flags(*of_step - for_planning, "verify", "max_batch", "max_seq"):
        raise UsageError(
            f"{given}: not possible with a graph file, which is already traced and contains no "
            "model; give the model file instead"
        )
    hardware = None if arguments.device is None else find_hardware(arguments.device)
    request, reserve_reason = _request(arguments, hardware)
    try:
        graph = Graph.load(arguments.problem)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(f"{arguments.problem}: {reason}; a graph file is expected") from error
    except FormatError as error:
        if hf_config.is_configuration(Path(arguments.problem)):
            raise LoadError(
                f"{arguments.problem} is a Hugging Face configuration, not a graph file: write "
                f"hf:{arguments.problem}"
            ) from error
        raise
    with_host = arguments.host is not None
    check_step_allows(graph, with_host=with_host, budget_of=arguments.budget_of)
    made_with = graph.meta.rewrites
    if (given := arguments.given_flags("rewrites")) and (made_with or arguments.rewrites != "none"):
        origin = f"made with {', '.join(made_with)}" if made_with else "the plain step"
        raise UsageError(
            f"{given} {arguments.rewrites}: not possible with a graph file, which is planned as it "
            f"is ({origin}); write another from the model file with {given} and --graph-out"
        )
    device = "not specified; sizes and times are those of the graph file"
    return Problem(
        name=arguments.problem,
        step=Variants.of(graph),
        device=device if hardware is None else hardware.title,
        costs=describe_costs(graph.meta.cost_model),
        request=request,
        reserve_reason=reserve_reason,
        notes=tuple(step_notes(graph)),
    )


def _request(
    arguments: Arguments, hardware: Hardware | None, costs: CostModel | None = None
) -> tuple[Request, str]:
    """The request for a step without rewrites, and why its reserve is a default ("": it is not)."""
    capacity_bytes = None if hardware is None else hardware.capacity_bytes
    if arguments.budget is None and capacity_bytes is None:
        raise UsageError(
            "--budget is required, as the memory of the device is unknown; give it, or name a "
            "device (--device h100)"
        )
    on_cuda = hardware is not None and hardware.kind == "cuda"
    check_budget_of(arguments.budget_of, kind=None if hardware is None else hardware.kind)
    budget_bytes, reserve_bytes = parse_budget(
        "100%" if arguments.budget is None else arguments.budget,
        arguments.reserve,
        capacity_bytes=capacity_bytes,
        on_cuda=on_cuda,
        reader=OF_THE_COMMAND,
    )
    is_default = on_cuda and arguments.reserve is None
    reason = "CUDA context and fragmentation; set with --reserve" if is_default else ""
    request = Request(
        budget_bytes=budget_bytes,
        reserve_bytes=reserve_bytes,
        time_limit_s=arguments.time_limit,
        seed=arguments.seed,
        places=with_disk(
            host_places(arguments.host, arguments.host_link, hardware=hardware, costs=costs),
            arguments.disk,
            arguments.disk_rate,
            costs=costs,
        ),
        budget_of=arguments.budget_of,
        optimizer_state=arguments.optimizer_state,
        parameters=arguments.parameters,
    )
    return request, reason


@contextlib.contextmanager
def _model_problem(
    arguments: Arguments, source: ModelSource, progress: Progress
) -> Iterator[Problem]:
    if arguments.device is not None and not arguments.device.startswith("cuda"):
        find_hardware(arguments.device)  # an unknown name is refused before PyTorch is loaded
    with progress.showing("loading PyTorch"):
        target = find_target(arguments.device, arguments.costs, runs_here=arguments.verify)
    request, reserve_reason = _request(arguments, target.hardware, target.costs)
    largest = arguments.largest
    allocator = (NOTE_ON_ALLOCATOR,) if target.hardware.kind == "cuda" else ()
    sizes = {name: getattr(arguments, name) for name in SIZE_NAMES if getattr(arguments, name)}
    if largest is not None:
        sizes.setdefault(largest, FIRST_SIZE[largest])
    if largest == "seq_length" and arguments.problem.startswith(CONFIGURATION):
        sizes.setdefault("batch_size", FIRST_SIZE["batch_size"])

    first_size_notes: list[str] = []  # notes if another first size was chosen

    def problem_of(file: ModelFile, step: Variants, size: str = "", **fields: Any) -> Problem:
        title = file.title or step.plain.meta.model or "model"
        of_trace = {
            "device": target.hardware.title,
            "costs": describe_costs(step.plain.meta.cost_model),
            "request": dataclasses.replace(request, rewrites=arguments.rewrites),
        }
        return Problem(
            name=f"{arguments.problem} ({title}{size})",
            step=step,
            reserve_reason=reserve_reason,
            verify=partial(verify_plan, file, target, arguments.autocast),
            size=None if largest is None else file.sizes[largest],
            **{**of_trace, **fields},
        )

    def size_text(file: ModelFile) -> str:
        return "" if largest is None else f", {largest.replace('_', ' ')} {file.sizes[largest]}"

    def traced_problem(file: ModelFile, optimizer: Mapping[str, Any] | None = None) -> Problem:
        step, notes = trace_step(file, target, arguments, optimizer, write_line=progress.write_line)
        optimizer = step.plain.meta.environment.get("optimizer")
        size = size_text(file)
        if largest == "seq_length" and "batch_size" in file.sizes:
            size += f", batch size {file.sizes['batch_size']}"
        return problem_of(
            file,
            step,
            size,
            notes=(*allocator, *first_size_notes, *notes),
            resized=None
            if largest is None
            else lambda n: traced_problem(file.resized(largest, n), optimizer),
        )

    def first_traced_problem(file: ModelFile) -> Problem:
        try:
            return traced_problem(file)
        except ModelFailsError as failed:
            if largest is None or getattr(arguments, largest):  # the user has given the size
                raise
            default_size = file.default_of(largest)
            size = RETRY_SIZE.get(largest) if default_size is None else default_size
            if size is None or size == FIRST_SIZE[largest]:
                raise
            what = largest.replace("_", " ")
            note = "" if default_size is None else ", that of get_batch"
            first_size_notes.append(
                f"The search began with {what} {size}{note}: with {what} {FIRST_SIZE[largest]} the "
                f"model itself fails ({failed})."
            )
            return traced_problem(file.resized(largest, size))

    def stage_problem(file: ModelFile, say: Say | None = None, *, quick: bool = False) -> Problem:
        notes = list(file.notes)
        split = split_stages(
            file, target, arguments, request, notes=notes, on_stage=say, quick=quick
        )
        stage = reported_stage(split, arguments.stage)
        solution = split.solutions[stage]
        step = solution.step
        return problem_of(
            file,
            step,
            f"{size_text(file)}, stage {stage} of {len(split.sizes)}",
            notes=(*stage_notes(split, stage), *allocator, *notes, *step_notes(step.plain)),
            planned=solution,
            stages=split.solutions if arguments.stage is None else (),
            slowest_s=math.inf if split.slowest_s is None else split.slowest_s,
            resized=None
            if largest is None
            else lambda n: stage_problem(file.resized(largest, n), quick=True),
            thorough=partial(stage_problem, file) if quick else None,
        )

    def measured_problem(file: ModelFile, refused: NotTracedError) -> Problem:
        solution, notes = plan_by_submodules(file, target, arguments, request, refused, progress)
        return problem_of(
            file,
            Variants.of(solution.graph),
            device="the CPU of this machine"
            if target.local_device == "cpu"
            else target.hardware.title,
            costs="measured on this machine, by submodule",
            request=request,
            notes=(*notes, *file.notes),
            planned=solution,
            not_traced=refused.why,
        )

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_model_file(source, sizes=sizes, varied=largest or ""))
        if arguments.tensor is not None:
            from graphs.trace import fake_mesh  # here: it takes torch

            file = file.on_mesh(stack.enter_context(fake_mesh(arguments.tensor)))
        if arguments.pipeline is not None:
            what = f"dividing {arguments.problem} into {arguments.pipeline} stages"
            with progress.showing(what) as say:
                problem = stage_problem(file, say, quick=largest is not None)
            yield problem
            return
        try:
            with progress.showing(f"tracing {arguments.problem}"):
                problem = first_traced_problem(file)
        except NotTracedError as refused:
            with progress.showing("not traceable: measuring real steps to plan by submodules"):
                problem = measured_problem(file, refused)
        yield problem
