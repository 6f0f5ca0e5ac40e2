"""From the command line to a Graph, a device and a budget.

A graph file is read. A model file is loaded, its model built on the meta device, so that no weights
are allocated, and one training step of it is traced.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.files import FormatError
from graphs.fsdp import ShardingError
from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.rewrites import Variants
from solver.analysis import FIRST
from solver.cli import hf_config
from solver.cli.arguments import Arguments, UsageError
from solver.cli.model_file import (
    CONFIGURATION,
    SIZE_NAMES,
    LoadError,
    ModelFile,
    ModelSource,
    located,
    opened,
    parse_source,
)
from solver.cli.progress import Say
from solver.common import format_size, parse_budget
from solver.device import Target, find_hardware, find_target, host_beside
from solver.reporting import describe_costs, step_notes
from solver.runtime_hooks import (
    NoRowError,
    Planned,
    Verification,
    VerifyError,
    run_submodule_planner,
    run_verifier,
)
from solver.schedule import Places, Request, Solution

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[str], AbstractContextManager[object]]

NOTABLE_OUTPUT_SHARE = 0.01
NOTABLE_OUTPUT_BYTES = 10**6
"""The report notes tensors returned beside the loss that are larger than both."""


MOST_BATCH_BYTES = 2**30
"""Of a batch that is built for its values."""
NOTE_ON_ALLOCATOR = (
    "Train with PYTORCH_ALLOC_CONF=expandable_segments:True: without it the allocator fragments "
    "memory in ways that no plan can predict and the reserve does not cover."
)


class NotTracedError(LoadError):
    """The step of the model cannot be captured as one graph.

    why: the message without the alternative that it ends with.
    """

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    name, device, costs, notes: for the report.
    step: its variants to plan.
    verify: runs the model with and without the plan, and says what runs (None for a graph file).
    resized: the problem at another value of the size that is maximized (None: nothing is).
    planned: the plan by submodules of a model that cannot be traced.
    rewrites: the word that the variants stand for ("none" for a graph file).
    """

    name: str
    step: Variants
    device: str
    costs: str
    budget_bytes: int
    reserve_bytes: int
    reserve_reason: str = ""
    places: Places | None = None
    notes: tuple[str, ...] = ()
    verify: Callable[[Solution, Say], Verification] | None = None
    resized: Callable[[int], Problem] | None = None
    planned: Solution | None = None
    rewrites: str = "none"

    @property
    def graph(self) -> Graph:
        """The plain step: what is said of the problem itself."""
        return self.step.plain

    def request(self, arguments: Arguments, method: str) -> Request:
        return Request(
            budget_bytes=self.budget_bytes,
            reserve_bytes=self.reserve_bytes,
            method=method,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            rewrites=self.rewrites,
            places=self.places,
        )


@contextlib.contextmanager
def opened_problem(arguments: Arguments, progress: Progress) -> Iterator[Problem]:
    """Load or trace the problem; inside the context a model file can import its neighbours.

    Raises UsageError, BudgetError, SizeError; LoadError, FormatError.
    """
    is_configuration = arguments.problem.startswith(CONFIGURATION)
    if arguments.problem.endswith(".json") and not is_configuration:
        with progress("reading the graph"):
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
    given = arguments.given(
        *("costs", "batch_size", "seq_length", "autocast", "accumulate", "fsdp"),
        *("verify", "max_batch", "max_seq"),
    )
    if given:
        raise UsageError(
            f"{given}: not possible with a graph file, which is already traced and contains no "
            "model; give the model file instead"
        )
    hardware = None if arguments.device is None else find_hardware(arguments.device)
    memory = _memory(arguments, hardware)
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
    made_with = graph.meta.rewrites
    if (given := arguments.given("rewrites")) and (made_with or arguments.rewrites != "none"):
        made = f"made with {', '.join(made_with)}" if made_with else "the plain step"
        raise UsageError(
            f"{given} {arguments.rewrites}: not possible with a graph file, which is planned as it "
            f"is ({made}); write another from the model file with {given} and --graph-out"
        )
    device = "not specified; sizes and times are those of the graph file"
    return Problem(
        name=arguments.problem,
        step=Variants.of(graph),
        device=device if hardware is None else hardware.title,
        costs=describe_costs(graph.meta.cost_model),
        notes=tuple(step_notes(graph)),
        **memory,
    )


def _memory(arguments: Arguments, hardware: Hardware | None) -> dict[str, Any]:
    """The fields of a Problem for budget, reserve, the reason of a default reserve, and host."""
    capacity_bytes = None if hardware is None else hardware.capacity_bytes
    if arguments.budget is None and capacity_bytes is None:
        raise UsageError(
            "--budget is required, as the memory of the device is unknown; give it, or name a "
            "device (--device h100)"
        )
    on_cuda = hardware is not None and hardware.kind == "cuda"
    budget_bytes, reserve_bytes = parse_budget(
        "100%" if arguments.budget is None else arguments.budget,
        arguments.reserve,
        capacity_bytes=capacity_bytes,
        on_cuda=on_cuda,
    )
    is_default = on_cuda and arguments.reserve is None
    reason = "CUDA context and fragmentation; set with --reserve" if is_default else ""
    return {
        "budget_bytes": budget_bytes,
        "reserve_bytes": reserve_bytes,
        "reserve_reason": reason,
        "places": host_beside(arguments.host, arguments.host_link, hardware=hardware),
    }


@contextlib.contextmanager
def _model_problem(
    arguments: Arguments, source: ModelSource, progress: Progress
) -> Iterator[Problem]:
    with progress("loading PyTorch"):
        target = find_target(arguments.device, arguments.costs)
    memory, largest = _memory(arguments, target.hardware), arguments.largest
    allocator = (NOTE_ON_ALLOCATOR,) if target.hardware.kind == "cuda" else ()
    sizes = {name: getattr(arguments, name) for name in SIZE_NAMES if getattr(arguments, name)}
    if largest is not None:
        sizes.setdefault(largest, FIRST[largest])
    if largest == "seq_length" and arguments.problem.startswith(CONFIGURATION):
        sizes.setdefault("batch_size", FIRST["batch_size"])

    def problem_of(file: ModelFile, step: Variants, size: str = "", **fields: Any) -> Problem:
        title = file.title or step.plain.meta.model or "model"
        return Problem(
            name=f"{arguments.problem} ({title}{size})",
            step=step,
            verify=partial(_verified, file, target, arguments.autocast),
            **fields,
            **memory,
        )

    def traced(file: ModelFile, optimizer: Mapping[str, Any] | None = None) -> Problem:
        step, notes = _traced(file, target, arguments, optimizer)
        optimizer = step.plain.meta.environment.get("optimizer")
        size = "" if largest is None else f", {largest.replace('_', ' ')} {file.sizes[largest]}"
        if largest == "seq_length" and "batch_size" in file.sizes:
            size += f", batch size {file.sizes['batch_size']}"
        return problem_of(
            file,
            step,
            size,
            device=target.hardware.title,
            costs=describe_costs(step.plain.meta.cost_model),
            notes=(*target.notes, *allocator, *notes),
            rewrites=arguments.rewrites,
            resized=None
            if largest is None
            else lambda n: traced(file.resized(largest, n), optimizer),
        )

    def measured(file: ModelFile, refused: NotTracedError) -> Problem:
        found = _planned_by_submodules(file, target, arguments, memory, refused)
        why = f"Not planned op by op, which may cost less: {refused.why}."
        return problem_of(
            file,
            Variants.of(found.solution.graph),
            device="the CPU of this machine" if target.kind == "cpu" else target.hardware.title,
            costs="measured on this machine, by submodule",
            notes=(why, *found.notes, *file.notes),
            planned=found.solution,
        )

    with opened(source, sizes=sizes, varied=largest or "") as file:
        try:
            with progress(f"tracing {arguments.problem}"):
                problem = traced(file)
        except NotTracedError as refused:
            with progress("not traceable: measuring real steps to plan by submodules"):
                problem = measured(file, refused)
        yield problem


def _planned_by_submodules(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    memory: Mapping[str, Any],
    refused: LoadError,
) -> Planned:
    """Raises LoadError with `refused` and why planning by submodules is not possible either."""
    names = [
        "rewrites",
        "compare",
        "autocast",
        "accumulate",
        "fsdp",
        "emit",
        "max_batch",
        "max_seq",
        "host",
    ]
    names += ["method"] if arguments.method != "auto" else []
    names += ["costs"] if arguments.costs == "roofline" else []
    names += ["device"] if target.hardware.kind != target.kind else []  # not on this machine
    given = arguments.given(*names)
    if given:
        raise LoadError(f"{refused}; the command does so without {given}") from refused
    try:
        return run_submodule_planner(
            **file.functions,
            device=target.torch_device,
            budget_bytes=memory["budget_bytes"],
            reserve_bytes=memory["reserve_bytes"],
            time_limit_s=arguments.time_limit,
        )
    except NoRowError as error:
        raise LoadError(f"{refused}; tried, and failed: {error}") from error
    except (Exception, SystemExit) as error:  # the code of the model may raise anything
        raise refused from error


def _traced(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    optimizer_costs: Mapping[str, Any] | None,
) -> tuple[Variants, list[str]]:
    """Build on the meta device and trace; also returns notes for the report.

    optimizer_costs: as a graph of this model at another size has them (None: not known).
    """
    from graphs.trace import TraceError, trace_variants
    from graphs.training_step import with_optimizer

    notes = list(file.notes)
    batch = _with_values(file, target.torch_device, notes)

    def variants(model: nn.Module) -> Variants:
        optimizer = file.optimizer(model) if optimizer_costs is None else None
        with _autocast(arguments.autocast, target.kind), _quiet_logs():
            return trace_variants(
                model,
                batch,
                loss=file.loss,
                inputs=file.inputs,
                optimizer=optimizer,
                gradients="accumulate" if arguments.accumulate else "fresh",
                device=target.torch_device,
                costs=target.costs,
                fsdp=arguments.fsdp,
                rewrites=arguments.rewrites,
            )

    def with_weights(refused: TraceError) -> Variants:
        """A part that cannot be traced is run and measured, which takes values."""
        if refused.runs_in_eager:
            with contextlib.suppress(Exception):  # then the step is refused as it was
                return variants(file.model().to(target.torch_device))
        raise refused

    try:
        try:
            step = variants(_on_meta(file.model, "the model", notes))
        except TraceError as error:
            step = with_weights(error)
    except ShardingError as error:
        raise UsageError(f"--fsdp {arguments.fsdp}: {error}") from error
    except TraceError as error:
        called_with = _called_with(error, batch)
        raise NotTracedError(
            f"{file.source}: {error}{called_with}", why=f"{file.source}: {error.why}{called_with}"
        ) from error
    if arguments.host is not None and step.plain.meta.environment.get("opaque"):
        raise UsageError(
            "--host: a part of the model is planned as one piece, which cannot be copied; leave "
            "out --host"
        )
    plain, *planned = (with_optimizer(g, optimizer_costs) for g in (step.plain, *step.planned))
    step = Variants(plain, tuple(planned))
    notes.extend(step_notes(step.plain))
    notes.extend(_note_on_outputs(step.plain))
    return step, notes


def _with_values(file: ModelFile, device: str, notes: list[str]) -> Any:
    """The batch on the device, for models that read it (is the padding mask all ones?).

    A batch of more than MOST_BATCH_BYTES is not allocated: it stays on the meta device.
    """
    from graphs.calls import nested  # here: it takes torch

    on_meta = _on_meta(file.batch, "the batch", notes)
    size_bytes = sum(t.numel() * t.element_size() for t in nested.tensors(on_meta))
    if size_bytes > MOST_BATCH_BYTES:
        notes.append(
            f"The batch of {format_size(size_bytes)} was not allocated, so its values are unknown: "
            "if forward reads them, apply plans anew at the first step."
        )
        return on_meta
    return nested.map_tensors(lambda tensor: tensor.to(device), file.batch())


def _on_meta(build: Callable[[], Any], what: str, notes: list[str]) -> Any:
    """Build on the meta device; what needs values to be built is built with real memory."""
    import torch

    try:
        with torch.device("meta"):
            return build()
    except LoadError as error:
        built = build()  # raises the real reason, if there is one
        notes.append(f"{what.capitalize()} was built in real memory; on the meta device: {error}.")
        return built


def _autocast(name: str | None, device: str) -> AbstractContextManager[Any]:
    """torch.autocast to "bf16" or "fp16" on the device; None: no autocast."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[name]
    return torch.autocast(device, dtype=dtype, enabled=name is not None)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Suppress the tracebacks that fake tensors log; the command prints one line instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _called_with(error: Exception, batch: Any) -> str:
    """The shapes of the batch, if the error is one of the model's own code."""
    if error.__cause__ is None:
        return ""
    from graphs.calls import nested  # here: it takes torch

    tensors = nested.tensors(batch)
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    return f"; get_batch() returned {', '.join(shown) or 'no tensor'}"


def _note_on_outputs(graph: Graph) -> Iterator[str]:
    """What the model returns beside the loss stays live to the end of the step."""
    returned_bytes = sum(
        tensor.size_bytes
        for tensor in graph.tensors
        if tensor.kind == "output" and tensor.name in graph.outputs
    )
    all_bytes = sum(t.size_bytes for t in graph.tensors if t.alias_of is None)
    if returned_bytes > max(NOTABLE_OUTPUT_BYTES, NOTABLE_OUTPUT_SHARE * all_bytes):
        yield (
            f"The model returns {format_size(returned_bytes)} of tensors beside the loss, which "
            "stay live to the end of the step. Returning only the loss frees them."
        )


def _verified(
    file: ModelFile, target: Target, autocast: str | None, solution: Solution, say: Say
) -> Verification:
    """Raises LoadError for the model file, VerifyError for the run."""
    device = target.torch_device
    try:
        step = {**file.functions, "device": device, "autocast": autocast}
        return run_verifier(solution, **step, say=say)
    except LoadError:
        raise
    except (ValueError, RuntimeError, MemoryError) as error:
        raise VerifyError(located(error, file.source)) from error
