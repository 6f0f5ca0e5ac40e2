"""Turns a PyTorch model and a batch into the Graph of one training step.

    graph = trace(model, batch, optimizer=optimizer)

The step is forward, loss, backward, optimizer. `graphs.trace.module_step` traces the module; this
file adds the rest: a loss that the caller computes, gradient accumulation, FSDP2, the optimizer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.capture import (
    KeptCapture,
    at_each_checkpoint,
    for_absent_card,
    one_at_a_time,
    refuse_gradient_dtypes,
    refuse_replaced_forwards,
)
from graphs.costs import CostModel, NodeCosts, default_costs, finish_measuring
from graphs.fsdp import Sharding, groups_of, sharded, sharded_stage, sharding_in_stage
from graphs.graph import Graph
from graphs.hardware import link_between
from graphs.model_calls import Call, TraceError, argument_order, as_call, check_call
from graphs.passes import Passes, PassesError, with_passes
from graphs.pipeline import Pipeline, with_pipeline
from graphs.rewrites import STOCK, StockVariants, Variants, allowed_variants, variants_of
from graphs.trace.mixed_precision import copy_with_values, in_precision_of, with_stored_dtypes
from graphs.trace.module_step import CapturedStep, loss_index, rehearsed, trace_module
from graphs.trace.traced_device import traced_device
from graphs.trace.zero_rank import engine_figures
from graphs.training_step import (
    ACCUMULATE,
    FRESH,
    OF_MICRO_BATCHES,
    OF_PASSES,
    TAKEN,
    GivenOptimizer,
    MetaOutputs,
    OutsideLoss,
    check_stage,
    indices_with_gradient,
    optimizer_costs,
    with_optimizer,
)
from graphs.zero import Zero, ZeroError, with_zero

GRADIENTS = (FRESH, ACCUMULATE)


@one_at_a_time
def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    gradients: str = "fresh",
    device: torch.device | str | None = None,
    costs: CostModel | None = None,
    fsdp: int | Sharding | None = None,
    pipeline: Pipeline | None = None,
    passes: int = 1,
    zero: Zero | None = None,
    rewrites: Iterable[str] = (),
) -> Graph:
    """Trace one training step into a Graph of time and memory.

    No tensor is allocated or changed, unless a submodule cannot be traced: that one is run and
    measured (`graphs.capture.opaque`).

    model: real, fake or on the meta device. The step uses the ambient autocast and the model's
        train or eval mode.
    batch: a tensor is called as model(x), a tuple as model(*x), a dict as model(**x).
    loss: None: the model returns the loss (a scalar, `.loss`, or the only scalar of a tuple).
        A function of (output, batch): the caller computes the loss with it; its operators are
        counted (phase "outside") but never rescheduled. If the function only selects a value that
        the model has computed (`output.loss`), the model computes the loss.
    inputs: a function that selects the part of the batch that the model is called with (`lambda
        batch: batch[0]` if the rest is for the loss). None: all of it.
    optimizer: its state and the memory of its step are counted; None: no optimizer. Give an
        optimizer, its class, a function from the trainable parameters to it, or its name in
        torch.optim.
    gradients: "fresh": None before the step; "accumulate": allocated before the step.
    device: the device of the step (default: the model's; meta means CPU).
    costs: gives seconds and workspace of each operator (default: measured on a CUDA device, the
        roofline of a generic CPU otherwise).
    fsdp: trace the step as one rank of FSDP2 runs it (`graphs.fsdp.transform`): a number of ranks,
        with each block of the model as a group, or a Sharding. `batch` is that of one rank.
    pipeline: trace the step of one micro-batch in a stage of a pipeline (`graphs.pipeline`).
        `model` is the stage and `batch` a micro-batch, whose tensors require gradients for all but
        the first stage. Only the last stage has a loss. `gradients` accumulate over the
        micro-batches; under GPipe, "fresh" ones do not exist in the first backward pass.
    passes: how many forward passes, each on a batch like this one, wait for one common backward
        pass (`graphs.passes`). `loss` is the loss of one of them.
    zero: trace the step as one rank of DeepSpeed's ZeRO runs it (`graphs.zero`). `batch` is that of
        one rank; `optimizer` is required.
    rewrites: names of the rewrites to apply (`graphs.rewrites`); (): the plain step.

    Raises TraceError, saying what cannot be traced and why; ShardingError for illegal groups;
    PipelineError for an impossible stage; PassesError for passes that cannot be planned; ZeroError
    for a step that DeepSpeed's engine runs differently from what would be planned.
    """
    traced = _check_and_trace(
        model,
        batch,
        lambda step: [step.with_rewrites(rewrites)],
        _Options(loss, inputs, optimizer, gradients, device, costs, fsdp, pipeline, passes, zero),
    )
    ((graph, _),) = traced.variants
    return graph


@one_at_a_time
def trace_variants(
    model: nn.Module,
    batch: Any,
    *,
    rewrites: str = "bitwise",
    fsdp: int | Sharding | None = None,
    **options: Any,
) -> Variants:
    """Trace the step once and return its variants: the plain step, and the step with the rewrites
    that a plan may choose from.

    rewrites: a word of `graphs.rewrites.WORDS`. A sharded step has only the variants of stock
        modules, and with `reshard_after_forward=None` each of these with and without resharding.
    The other parameters are those of `trace`.

    Raises what `trace` raises; ValueError for an unknown word.
    """
    tries_both = isinstance(fsdp, Sharding) and fsdp.reshard_after_forward is None
    if tries_both and options.get("pipeline") is None:
        assert isinstance(fsdp, Sharding)
        both = [replace(fsdp, reshard_after_forward=reshards) for reshards in (True, False)]
        resharded, kept_whole = (
            trace_variants(model, batch, rewrites=rewrites, fsdp=each, **options) for each in both
        )
        return replace(resharded, planned=(*resharded.planned, *kept_whole.planned))
    planned = variants_of(rewrites, sharded=fsdp is not None)
    if fsdp is not None and options.get("pipeline") is not None:
        planned = ((),)  # losses in chunks are not modelled for several micro-batches in flight
    traced = _check_and_trace(
        model, batch, lambda step: step.variants(planned), _Options(fsdp=fsdp, **options)
    )
    found = allowed_variants([(graph, step.captured) for graph, step in traced.variants], planned)
    captured = traced.variants[0][1].captured
    kept = KeptCapture.of(model, traced.call, captured, device=traced.device)
    if traced.stock is None or rewrites == "none":
        return replace(found, kept=kept)
    return replace(found, kept=kept, stock=StockVariants(traced.stock))


def _sharding(
    fsdp: int | Sharding | None, pipeline: Pipeline | None, model: nn.Module, costs: CostModel
) -> Sharding | None:
    """The sharding that `fsdp` asks for, as a stage runs it if there is a pipeline, with the groups
    of this model and the link of the card that is planned for; None: none."""
    if pipeline is not None:
        pipeline.check_runs()
    if fsdp is None:
        return None
    if isinstance(fsdp, int):
        fsdp = Sharding(n_ranks=fsdp, reshard_after_forward=True if pipeline is None else None)
    if pipeline is not None:
        fsdp = sharding_in_stage(fsdp, pipeline)
    card = NodeCosts(costs).hardware
    link = link_between(card).name if card is not None and card.kind == "cuda" else None
    return replace(
        fsdp,
        groups=groups_of(model, fsdp),
        reshard_after_forward=fsdp.reshard_after_forward is not False,
        link=fsdp.link or link,
    )


@dataclass(frozen=True)
class _TracedStep:
    """The result of tracing a step.

    variants: for each chosen variant, the graph of the whole step and the captured step of the
        module.
    call: how the model was called.
    device: the device of the step.
    stock: makes the graphs of the variants that stock modules can run. None: there are none besides
        the chosen ones.
    """

    variants: list[tuple[Graph, CapturedStep]]
    call: Call
    device: torch.device
    stock: Callable[[], tuple[Graph, ...]] | None = None


@dataclass(frozen=True)
class _Options:
    """The options of `trace`, which explains them."""

    loss: Callable[[Any, Any], torch.Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None
    optimizer: GivenOptimizer | None = None
    gradients: str = "fresh"
    device: torch.device | str | None = None
    costs: CostModel | None = None
    fsdp: int | Sharding | None = None
    pipeline: Pipeline | None = None
    passes: int = 1
    zero: Zero | None = None


def _check_and_trace(
    model: nn.Module,
    batch: Any,
    choose: Callable[[CapturedStep], list[CapturedStep]],
    given: _Options,
) -> _TracedStep:
    """Check the options and trace the step.

    choose: selects the variants to build from the captured step.
    """
    gradients, fsdp, pipeline, zero = given.gradients, given.fsdp, given.pipeline, given.zero
    passes = Passes(given.passes, accumulate=gradients == ACCUMULATE)
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}; one of {', '.join(GRADIENTS)}")
    refuse_replaced_forwards(model)
    args, kwargs = as_call(batch, given.inputs)
    check_call(model, args, kwargs)
    call = Call.of(args, kwargs, order=argument_order(model.forward))
    refuse_gradient_dtypes(model, call.tensors)  # FSDP2's mixed precision traces a copy
    if pipeline is not None:
        check_stage(model, call, pipeline, has_loss=given.loss is not None)
        in_turn = pipeline.schedule == "gpipe" and fsdp is None and gradients == FRESH
        if pipeline.n_microbatches > 1 or fsdp is not None:  # FSDP2 reduces after the last one
            # under GPipe no gradients exist before the first backward pass
            gradients = OF_PASSES if in_turn else OF_MICRO_BATCHES
    if passes.n > 1:
        if pipeline is not None or fsdp is not None:
            other = "a stage of a pipeline" if fsdp is None else "FSDP2"
            raise PassesError(f"passes is {passes.n}: not planned for {other}; leave it out")
        gradients = OF_PASSES
    if zero is not None:
        others = {"fsdp": fsdp, "pipeline": pipeline, "passes": passes.n > 1}
        if combined := [name for name, value in others.items() if value]:
            raise ZeroError(f"zero cannot be combined with {combined[0]}: leave one out")
        if gradients != FRESH:
            raise ZeroError(
                f"gradients is {gradients!r}, but DeepSpeed's engine starts each step without "
                "gradients; give gradients='fresh'"
            )
        gradients = TAKEN if zero.frees_gradients else FRESH
    card = NodeCosts(given.costs).hardware
    target = traced_device(model, call, given.device, card)
    capability = None if card is None else card.compute_capability
    with for_absent_card(target, capability, model=model):
        costs = default_costs(target) if given.costs is None else given.costs
        given = replace(given, gradients=gradients)
        return _trace_for_device(target, model, batch, call, choose, given, costs, passes)


def _trace_for_device(
    target: torch.device,
    model: nn.Module,
    batch: Any,
    call: Call,
    choose: Callable[[CapturedStep], list[CapturedStep]],
    given: _Options,
    costs: CostModel,
    passes: Passes,
) -> _TracedStep:
    """Trace the step for this device: the module first, then everything around it."""
    loss, fsdp, pipeline, zero = given.loss, given.fsdp, given.pipeline, given.zero
    optimizer = given.optimizer
    choose_outputs = loss_index if pipeline is None or pipeline.is_last else indices_with_gradient
    sharding = _sharding(fsdp, pipeline, model, costs)
    whole_model = model
    if sharding is not None and sharding.mp_policy is not None:
        model = in_precision_of(sharding.mp_policy, model, sharding.groups or ())
    outside: OutsideLoss | None = None
    gradient_outputs: tuple[int, ...] = ()
    if loss is not None:
        outputs = MetaOutputs(model, call, device=target)
        loss_output = outputs.index_returned_by(loss, batch)
        if loss_output is None:
            outside = OutsideLoss(loss, batch, outputs, call, device=target, choose=loss_index)
            gradient_outputs = outside.gradient_outputs()
        else:
            gradient_outputs = (loss_output,)
    traced = functools.partial(
        trace_module,
        call=call,
        device=target,
        choose=choose_outputs if loss is None else lambda _output: gradient_outputs,
        gradients=given.gradients,
        costs=costs,
        gradient_layouts=outside.gradient_layouts() if outside else {},
    )
    checkpoints_itself = threading.Event()
    with at_each_checkpoint(checkpoints_itself.set):
        try:
            step = traced(model)
        except TraceError:  # a part that cannot be traced is run, which takes values
            with_values = copy_with_values(sharding, whole_model)
            if with_values is None:
                raise
            model = with_values
            step = traced(model)
    step = rehearsed(model, call, step, device=target)
    loss_layout = outside.extract_layout(cost=NodeCosts(costs)) if outside else None
    optimizer_cost = zero_figures = None
    if zero is not None:
        zero_figures, optimizer_cost = engine_figures(
            zero, optimizer, model, device=target, costs=costs
        )
    elif optimizer is not None:
        n_ranks = 1 if sharding is None else sharding.n_ranks
        optimizer_cost = optimizer_costs(
            optimizer, whole_model, device=target, costs=costs, n_ranks=n_ranks
        )

    def whole_step(step: CapturedStep) -> Graph:
        graph = step.graph
        if outside is not None and loss_layout is not None:
            graph = outside.insert(graph, step.captured, step.layout, loss_layout)
        if sharding is not None:
            on_cpu = target.type == "cpu" and not hardware.is_cuda(costs.description)
            graph = with_stored_dtypes(graph, whole_model)
            if pipeline is None:
                graph = sharded(graph, sharding, on_cpu=on_cpu)
            else:
                n = pipeline.n_microbatches
                graph = sharded_stage(graph, sharding, n_microbatches=n, on_cpu=on_cpu)
        return complete(graph)

    # a partial of a module-level function, which keeps no reference to the model
    complete = functools.partial(
        _completed_step,
        optimizer=optimizer_cost,
        zero=zero_figures,
        pipeline=pipeline,
        passes=passes,
        own_checkpoints=checkpoints_itself.is_set(),
    )
    steps = choose(step)
    graphs = [whole_step(each) for each in steps]
    finish_measuring(costs)
    stock = None
    if outside is None and sharding is None and pipeline is None:
        stock = functools.partial(_stock_graphs, step, complete, costs)
    return _TracedStep(list(zip(graphs, steps, strict=True)), call, target, stock)


def _completed_step(
    graph: Graph,
    *,
    optimizer: dict[str, Any] | None,
    zero: dict[str, Any] | None,
    pipeline: Pipeline | None,
    passes: Passes,
    own_checkpoints: bool,
) -> Graph:
    """The step of the module, completed with ZeRO, optimizer, pipeline and passes."""
    graph = with_optimizer(with_zero(graph, zero), optimizer)
    graph = with_passes(with_pipeline(graph, pipeline), passes)
    if own_checkpoints:
        graph = replace(graph, meta=replace(graph.meta, own_checkpoints=True))
    return graph


@one_at_a_time
def _stock_graphs(
    step: CapturedStep, complete: Callable[[Graph], Graph], costs: CostModel
) -> tuple[Graph, ...]:
    """The variants that stock modules can run and that keep all bits of the plain step on the
    device."""
    traced = [(complete(each.graph), each.captured) for each in step.variants(STOCK)]
    finish_measuring(costs)
    return allowed_variants(traced, STOCK).planned
