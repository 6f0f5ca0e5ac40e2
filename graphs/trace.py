"""From a PyTorch model and a batch to the Graph of one training step.

    graph = trace(model, batch, optimizer=optimizer)

The step is forward, loss, backward, optimizer. `graphs.capture.joint_graph` records the module on
fake tensors, `graphs.capture.extraction` folds views away, `graphs.costs.models` gives the cost of
each operator, and this module adds the rest of the step: a loss that the caller computes, gradient
accumulation, FSDP2, the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.capture import (
    Capture,
    KeptCapture,
    Planned,
    at_each_checkpoint,
    capture,
    extract,
    for_absent_card,
    one_at_a_time,
    refuse_replaced_forwards,
    rehearse,
)
from graphs.captured_graph import captured_graph
from graphs.costs import CostModel, NodeCosts, default_costs, finish_measuring
from graphs.fsdp import Sharding, groups_of, sharded
from graphs.graph import Graph
from graphs.links import link_between
from graphs.mixed_precision import in_precision_of, with_stored
from graphs.model_calls import (
    Call,
    TraceError,
    argument_order,
    as_call,
    check_call,
    find_loss,
    nested,
)
from graphs.pipeline import Pipeline, with_pipeline
from graphs.rewrites import (
    Variant,
    Variants,
    offered,
    program_with,
    rewritten,
    variants_of,
)
from graphs.step_variants import CapturedStep
from graphs.traced_device import refuse_other, traced_device
from graphs.training_step import (
    ACCUMULATE,
    FRESH,
    OF_MICRO_BATCHES,
    GivenOptimizer,
    MetaOutputs,
    OutsideLoss,
    check_stage,
    indices_with_gradient,
    optimizer_costs,
    with_optimizer,
)

__all__ = ["CapturedStep", "TraceError", "rehearsed", "trace", "trace_module", "trace_variants"]

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
    rewrites: Iterable[str] = (),
) -> Graph:
    """Trace one training step into a cost/memory Graph; no tensor is allocated or changed, unless
    a submodule cannot be traced: then it is run and measured (`graphs.capture.opaque`).

    model: real, fake or on the meta device. The step uses the ambient autocast and the model's
        train or eval mode.
    batch: a tensor is called as model(x), a tuple as model(*x), a dict as model(**x).
    loss: None: the model returns the loss (a scalar, `.loss`, or the only scalar of a tuple).
        A function of (output, batch): the caller computes the loss; its operators are counted
        (phase "outside") but never rescheduled. If it only selects what the model has computed
        (`output.loss`), the loss is the model's.
    inputs: a function that selects the part of the batch that the model is called with (`lambda
        batch: batch[0]`, where the rest is for the loss). None: all of it.
    optimizer: its state and the memory of its step are counted; None: no optimizer. It, its class,
        a function from the trainable parameters to it, or its name in torch.optim.
    gradients: "fresh": None before the step; "accumulate": allocated before the step.
    device: of the graph's tensors (default: the model's; meta means CPU).
    costs: seconds and workspace of each operator (default: measured on a CUDA device, the roofline
        of a generic CPU otherwise).
    fsdp: the step as one rank of FSDP2 runs it (`graphs.fsdp.transform`): a number of ranks, with
        each block of the model as a group, or a Sharding. `batch` is that of one rank.
    pipeline: the step of one micro-batch in a stage of a pipeline (`graphs.pipeline`). `model` is
        the stage, `batch` a micro-batch: for all but the first stage with tensors that require
        gradients. Only the last stage has a loss. `gradients` add up over the micro-batches.
    rewrites: names of `graphs.rewrites` to change the step with; (): the step as it is.

    Raises TraceError, saying what cannot be traced and why; ShardingError for illegal groups;
    PipelineError for a stage that cannot be one.
    """
    traced = _traced(
        model,
        batch,
        lambda step: [step.with_rewrites(rewrites)],
        loss=loss,
        inputs=inputs,
        optimizer=optimizer,
        gradients=gradients,
        device=device,
        costs=costs,
        fsdp=fsdp,
        pipeline=pipeline,
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
    """Trace the step once, as itself and with the rewrites that a plan may choose from.

    rewrites: a word of `graphs.rewrites.WORDS`. A sharded step has none, but with
        `reshard_after_forward=None` the one that reshards and the one that does not.
    The rest is as for `trace`.

    Raises what `trace` raises; ValueError for another word.
    """
    if isinstance(fsdp, Sharding) and fsdp.reshard_after_forward is None:
        of_one = replace(fsdp, reshard_after_forward=True)
        resharded = trace_variants(model, batch, rewrites=rewrites, fsdp=of_one, **options)
        of_one = replace(fsdp, reshard_after_forward=False)
        kept_whole = trace_variants(model, batch, rewrites=rewrites, fsdp=of_one, **options)
        return replace(resharded, planned=(*resharded.planned, *kept_whole.planned))
    planned = variants_of(rewrites, sharded=fsdp is not None)
    traced = _traced(model, batch, lambda step: step.variants(planned), fsdp=fsdp, **options)
    found = offered([(graph, step.captured) for graph, step in traced.variants], planned)
    captured = traced.variants[0][1].captured
    kept = KeptCapture.of(model, traced.call, captured, device=traced.device)
    return replace(found, kept=kept)


def _link_of(card: hardware.Hardware | None) -> str | None:
    """Between ranks on such cards; None for the CPU, and for what is not known."""
    return link_between(card).name if card is not None and card.kind == "cuda" else None


@dataclass(frozen=True)
class _Traced:
    """variants: the graph of each chosen variant of the step, and its module's part."""

    variants: list[tuple[Graph, CapturedStep]]
    call: Call
    device: torch.device


def _traced(
    model: nn.Module,
    batch: Any,
    choose: Callable[[CapturedStep], list[CapturedStep]],
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    gradients: str = "fresh",
    device: torch.device | str | None = None,
    costs: CostModel | None = None,
    fsdp: int | Sharding | None = None,
    pipeline: Pipeline | None = None,
    **options: Any,
) -> _Traced:
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}; one of {', '.join(GRADIENTS)}")
    refuse_replaced_forwards(model)
    args, kwargs = as_call(batch, inputs)
    check_call(model, args, kwargs)
    call = Call.of(args, kwargs, order=argument_order(model.forward))
    if pipeline is not None:
        check_stage(model, call, pipeline, has_loss=loss is not None, is_sharded=fsdp is not None)
        if pipeline.n_microbatches > 1:
            gradients = OF_MICRO_BATCHES
    card = NodeCosts(costs).hardware
    target = traced_device(model, call, device, card)
    with for_absent_card(target, None if card is None else card.compute_capability):
        return _traced_on(
            target,
            model,
            batch,
            call,
            choose,
            loss=loss,
            gradients=gradients,
            costs=default_costs(target) if costs is None else costs,
            fsdp=fsdp,
            pipeline=pipeline,
            **options,
        )


def _traced_on(
    target: torch.device,
    model: nn.Module,
    batch: Any,
    call: Call,
    choose: Callable[[CapturedStep], list[CapturedStep]],
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    gradients: str,
    costs: CostModel,
    fsdp: int | Sharding | None,
    pipeline: Pipeline | None,
    optimizer: GivenOptimizer | None = None,
) -> _Traced:
    returned = loss_index if pipeline is None or pipeline.is_last else indices_with_gradient
    sharding = Sharding(n_ranks=fsdp) if isinstance(fsdp, int) else fsdp
    groups = None if sharding is None else groups_of(model, sharding)
    given = model
    if sharding is not None and sharding.mp_policy is not None:
        model = in_precision_of(sharding.mp_policy, model, groups or ())
    outside: OutsideLoss | None = None
    chosen: tuple[int, ...] = ()
    if loss is not None:
        outputs = MetaOutputs(model, call, device=target)
        picked = outputs.returned_by(loss, batch)
        if picked is None:
            outside = OutsideLoss(loss, batch, outputs, call, device=target, choose=loss_index)
            chosen = outside.gradient_outputs()
        else:
            chosen = (picked,)
    checkpoints_itself = threading.Event()
    with at_each_checkpoint(checkpoints_itself.set):
        step = trace_module(
            model,
            call,
            device=target,
            choose=returned if loss is None else lambda _output: chosen,
            gradients=gradients,
            costs=costs,
            arriving=outside.gradient_strides() if outside else {},
        )
    if step.captured.opaque and fsdp is not None:
        part = step.captured.opaque[0]
        raise TraceError(f"{part.path!r} cannot be planned for sharded steps: {part.why}")
    step = rehearsed(model, call, step, device=target)
    loss_layout = outside.extracted(cost=NodeCosts(costs)) if outside else None
    n_ranks = 1 if sharding is None else sharding.n_ranks
    where: dict[str, Any] = {"device": target, "costs": costs, "n_ranks": n_ranks}
    optimizer_cost = None if optimizer is None else optimizer_costs(optimizer, given, **where)

    def whole(step: CapturedStep) -> Graph:
        graph = step.graph
        if outside is not None and loss_layout is not None:
            graph = outside.insert(graph, step.captured, step.layout, loss_layout)
        if sharding is not None and groups is not None:
            on_cpu = target.type == "cpu" and not hardware.is_cuda(costs.description)
            graph = sharded(
                with_stored(graph, given),
                n_ranks=n_ranks,
                groups=groups,
                on_cpu=on_cpu,
                n_replicas=sharding.n_replicas,
                reshard_after_forward=sharding.reshard_after_forward is not False,
                link=sharding.link or _link_of(NodeCosts(costs).hardware),
                mp_policy=sharding.mp_policy,
                accumulates_whole=sharding.accumulates_whole,
            )
        if optimizer_cost is not None:
            graph = with_optimizer(graph, optimizer_cost)
        graph = with_pipeline(graph, pipeline)
        own = checkpoints_itself.is_set()
        return replace(graph, meta=replace(graph.meta, own_checkpoints=True)) if own else graph

    steps = choose(step)
    graphs = [whole(each) for each in steps]
    finish_measuring(costs)
    return _Traced(list(zip(graphs, steps, strict=True)), call, target)


@one_at_a_time
def trace_module(
    model: nn.Module,
    call: Call,
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
    gradients: str,
    costs: CostModel | None,
    rewrites: Iterable[str] = (),
    opaque: Planned = (),
    known: Capture | None = None,
    arriving: Mapping[int, tuple[int, ...]] | None = None,
) -> CapturedStep:
    """Trace the module alone, without outside loss and optimizer. `costs=None`: all zero.

    opaque: of the environment of a plan for this step.
    known: the traced program, where there is one already (`KeptCapture`).
    arriving: index of an output -> strides of its gradient, where they are not the output's own.
    """
    if device is not None:
        refuse_other(device)
    captured = known
    if captured is None:
        captured = capture(
            model, call, device=device, choose=choose, planned=opaque, arriving=arriving
        )
    original, form = captured, call.without_values()  # the step outlives the batch

    def extracted(program: Capture, variant: Variant, costs: CostModel | None) -> CapturedStep:
        cost = NodeCosts(costs)
        layout = rewritten(extract(program, cost=cost), variant)
        graph = captured_graph(
            model, form, program, layout, variant, device=device, gradients=gradients, cost=cost
        )
        return CapturedStep(program, layout, graph, original, costs, extracted)

    variant = tuple(rewrites)
    return extracted(program_with(original, variant), variant, costs)


@one_at_a_time
def rehearsed(
    model: nn.Module, call: Call, step: CapturedStep, *, device: torch.device | None
) -> CapturedStep:
    """The step of this call with what a baseline has to know of eager mode: it is run once more, on
    fake tensors (`graphs.capture.rehearse`). model, call, device: as it was traced with.
    """
    plain = step.with_rewrites(())
    return step.as_rehearsed(rehearse(model, call, plain.captured, plain.layout, device=device))


def loss_index(output: Any) -> tuple[int, ...]:
    """The index of the loss among the flat outputs of a model that returns it."""
    loss = find_loss(output)
    flat = nested.leaves(output)
    return (next(index for index, item in enumerate(flat) if item is loss),)
