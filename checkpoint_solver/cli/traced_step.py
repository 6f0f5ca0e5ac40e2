"""Trace the variants of a model file's training step, with notes for the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from checkpoint_solver.cli.arguments import AUTO, Arguments
from checkpoint_solver.cli.memory_to_run import ModelSizes, estimate_memory
from checkpoint_solver.cli.model_file import ModelFile
from checkpoint_solver.cli.model_source import LoadError, error_text
from checkpoint_solver.cli.usage import UsageError
from graphs.files import FormatError
from graphs.fsdp import MixedPrecision, Sharding, ShardingError
from graphs.graph import Graph
from graphs.pipeline import PipelineError
from graphs.rewrites import Variants
from graphs.zero import Zero, ZeroError
from solver.device_and_costs import Target
from solver.reporting import step_notes
from solver.sizes_deadlines_progress import format_size

if TYPE_CHECKING:
    from torch import nn

    from graphs.trace import TraceError

NOTABLE_OUTPUT_SHARE = 0.01
NOTABLE_OUTPUT_BYTES = 10**6
"""The report mentions tensors returned besides the loss if they exceed both: this share of the
step's tensors, and this many bytes."""


MOST_BATCH_BYTES = 2**30
"""A larger batch is not allocated: it stays on the meta device, without values."""


class NotTracedError(LoadError):
    """The step of the model cannot be captured as one graph.

    why: the message without the advice at its end.
    sizes: the sizes of model and batch (None: unknown).
    """

    def __init__(self, message: str, *, why: str, sizes: ModelSizes | None) -> None:
        super().__init__(message)
        self.why = why
        self.sizes = sizes


class ModelFailsError(LoadError):
    """The forward pass of the model fails on the batch of its file."""


def trace_step(
    file: ModelFile,
    target: Target,
    arguments: Arguments,
    optimizer_costs: Mapping[str, Any] | None,
    *,
    write_line: Callable[[str], None],
) -> tuple[Variants, list[str]]:
    """Build the model on the meta device and trace its step; also returns notes for the report.

    optimizer_costs: the optimizer's costs from a graph of this model at another size (None: trace
        the optimizer).
    write_line: called with a line before something runs on this machine.
    """
    from graphs.capture import FailsOnBatchError
    from graphs.model_calls import NoLossError
    from graphs.trace import TraceError, trace_variants
    from graphs.training_step import with_optimizer

    with naming_options(arguments):
        zero = _zero_of(arguments)
    if zero is not None:  # those figures would include the engine's step
        optimizer_costs = None
    notes = list(file.notes)
    batch = batch_with_values(file, target.local_device, notes)

    def variants(model: nn.Module, target: Target) -> Variants:
        optimizer = file.optimizer(model) if optimizer_costs is None else None
        with in_autocast(arguments.autocast, target.local_device):
            return trace_variants(
                model,
                batch,
                loss=file.loss,
                inputs=file.inputs,
                optimizer=optimizer,
                gradients="accumulate" if arguments.accumulate else "fresh",
                device=target.torch_device,
                costs=target.costs,
                fsdp=sharding_of(arguments),
                passes=arguments.passes,
                zero=zero,
                rewrites=arguments.rewrites,
            )

    def with_weights(refused: TraceError) -> tuple[Variants, Target]:
        """Build the model with its weights and trace again; a part that cannot be traced is then
        run and measured. Raises `refused` if that does not help."""
        if refused.runs_in_eager:
            run = estimate_memory(sizes, target.local_device, with_gradients=False)
            if not run.fits:
                raise refused
            write_line(
                f"not traced: {refused.short}. The model is now built with its weights, so "
                f"that this part can run here and, if possible, be planned as one piece ({run})"
            )
            try:
                built, local_target = file.model().to(target.local_device), target.running_here()
                return variants(built, local_target), local_target
            except Exception as error:  # the code of the model may raise anything
                raise _refusal_with_reason(refused, error, file) from error
        raise refused

    model = build_on_meta(file.model, "the model", notes)
    sizes = ModelSizes.of(model, batch)
    try:
        with naming_options(arguments):
            try:
                step, traced_for = target.traced_with(lambda to: variants(model, to))
            except TraceError as error:
                step, traced_for = with_weights(error)
    except FailsOnBatchError as error:
        raise ModelFailsError(f"{file.source}: {error}{_batch_text(error, batch)}") from error
    except NoLossError as error:
        hint = "; define get_loss(output, batch) in the model file" if file.loss is None else ""
        raise LoadError(f"{file.source}: {error}{hint}") from error
    except TraceError as error:
        batch_text = _batch_text(error, batch)
        raise NotTracedError(
            f"{file.source}: {error}{batch_text}",
            why=f"{file.source}: {error.why}{batch_text}",
            sizes=sizes,
        ) from error
    plain, *planned = (with_optimizer(g, optimizer_costs) for g in (step.plain, *step.planned))
    step = Variants(plain, tuple(planned))
    notes[:0] = traced_for.notes
    notes.extend(step_notes(step.plain))
    notes.extend(_note_on_outputs(step.plain))
    return step, notes


def batch_with_values(file: ModelFile, device: str, notes: list[str]) -> Any:
    """The batch on the device with its values, which some models read (is the padding mask all
    ones?).

    A batch of more than MOST_BATCH_BYTES is not allocated: it stays on the meta device. A note says
    so.
    """
    from graphs.model_calls import nested  # here: it takes torch

    meta_batch = build_on_meta(file.batch, "the batch", [])  # no note: it is real anyway
    size_bytes = sum(t.numel() * t.element_size() for t in nested.tensors(meta_batch))
    if size_bytes > MOST_BATCH_BYTES:
        notes.append(
            f"The batch of {format_size(size_bytes)} was not allocated, so its values are unknown: "
            "if forward reads them, apply plans again at the first step."
        )
        return meta_batch
    return nested.map_tensors(lambda tensor: tensor.to(device), file.batch())


def build_on_meta(build: Callable[[], Any], what: str, notes: list[str]) -> Any:
    """Call `build` on the meta device; if that fails, with real memory, and add a note.

    what: "the model" or "the batch", for the note.
    """
    import torch

    try:
        with torch.device("meta"):
            return build()
    except LoadError as error:
        built = build()  # raises the real reason, if there is one
        notes.append(
            f"{what.capitalize()} was built in real memory, because building it on the meta device "
            f"failed: {error}."
        )
        return built


def in_autocast(name: str | None, device: str) -> AbstractContextManager[Any]:
    """torch.autocast to "bf16" or "fp16" on the device; None: no autocast."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[name]
    return torch.autocast(device, dtype=dtype, enabled=name is not None)


def _refusal_with_reason(refused: TraceError, error: Exception, file: ModelFile) -> TraceError:
    """The refusal, extended by why tracing the model with its weights failed too, if that differs.

    error: what was raised with the weights.
    """
    from graphs.trace import TraceError  # here: it takes torch

    reason = error.why if isinstance(error, TraceError) else error_text(error, file.source)
    reasons = [] if reason == refused.why else [f"with its weights: {reason}"]
    if isinstance(error, TraceError):
        reasons += getattr(error, "__notes__", ())  # why a part is not one piece
    if not reasons:
        return refused
    why = "; ".join((refused.why, *reasons))
    return TraceError(why, runs_in_eager=refused.runs_in_eager, short=refused.short)


@contextlib.contextmanager
def naming_options(arguments: Arguments) -> Iterator[None]:
    """Turn errors about the division of the step among ranks into UsageErrors that name the option
    that asks for it."""
    from graphs.capture import MeshError  # here: it takes torch

    try:
        yield
    except ShardingError as error:
        raise UsageError(f"--fsdp {arguments.fsdp}: {error}") from error
    except ZeroError as error:
        raise UsageError(f"--zero {arguments.zero}: {error}") from error
    except MeshError as error:
        raise UsageError(f"--tensor {arguments.tensor}: {error}") from error
    except PipelineError as error:
        raise UsageError(f"--pipeline {arguments.pipeline}: {error}") from error


_RESHARD = {"yes": True, "no": False, AUTO: None}
"""The value of --fsdp-reshard -> `Sharding.reshard_after_forward`."""


def sharding_of(arguments: Arguments) -> Sharding | None:
    """The sharding described by `--fsdp` and its other options (None: no --fsdp).

    Raises UsageError, ShardingError.
    """
    if arguments.fsdp is None:
        return None
    default = "yes" if arguments.pipeline is None else AUTO
    return Sharding(
        arguments.fsdp,
        n_replicas=arguments.fsdp_replicas,
        reshard_after_forward=_RESHARD[arguments.fsdp_reshard or default],
        link=arguments.fsdp_link,
        mp_policy=_mixed_precision(arguments.fsdp_precision),
    )


def _mixed_precision(given: str | None) -> MixedPrecision | None:
    if given is None:
        return None
    param_dtype, _, reduce_dtype = (each.strip() for each in given.partition(","))
    policy = MixedPrecision(param_dtype or None, reduce_dtype or None)
    if policy == MixedPrecision():
        raise UsageError(
            f"--fsdp-precision {given!r} names no dtype; 'bfloat16', or "
            "'bfloat16,float32' for another one in which gradients are reduced"
        )
    return policy


def _zero_of(arguments: Arguments) -> Zero | None:
    if arguments.zero is None:
        return None
    try:
        return Zero(arguments.zero, n_ranks=arguments.ranks or 0, config=arguments.ds_config)
    except (FormatError, OSError) as error:
        raise UsageError(f"--ds-config {arguments.ds_config}: {error}") from error


def _batch_text(error: Exception, batch: Any) -> str:
    """The shapes of the batch, if the error is one of the model's own code."""
    if error.__cause__ is None:
        return ""
    from graphs.model_calls import nested  # here: it takes torch

    tensors = nested.tensors(batch)
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    return f"; get_batch() returned {', '.join(shown) or 'no tensor'}"


def _note_on_outputs(graph: Graph) -> Iterator[str]:
    """A sentence for the report if the model returns large tensors besides the loss."""
    returned_bytes = sum(
        tensor.size_bytes
        for tensor in graph.tensors
        if tensor.kind == "output" and tensor.name in graph.outputs
    )
    all_bytes = sum(t.size_bytes for t in graph.tensors if t.alias_of is None)
    if returned_bytes > max(NOTABLE_OUTPUT_BYTES, NOTABLE_OUTPUT_SHARE * all_bytes):
        yield (
            f"The model returns {format_size(returned_bytes)} of tensors besides the loss, which "
            "stay live to the end of the step. Returning only the loss frees them."
        )
