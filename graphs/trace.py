"""From a PyTorch model and a batch to the Graph of one training step.

    graph = trace(model, batch, optimizer=optimizer)

The step is forward, loss, backward, optimizer. `graphs.capture.joint_graph` records the module on
fake tensors, `graphs.capture.extraction` folds views away, `graphs.costs.models` gives the cost of
each operator, and this module adds the rest of the step: a loss that the caller computes, gradient
accumulation, FSDP2, the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.calls import (
    Call,
    TraceError,
    argument_order,
    as_call,
    buffer_forms,
    bytes_by_dtype,
    check_call,
    environment_of,
    find_loss,
    input_forms,
    nested,
    parameter_forms,
    tensor_names,
)
from graphs.capture import (
    Capture,
    KeptCapture,
    Layout,
    Planned,
    Rehearsed,
    at_each_checkpoint,
    caching_configs,
    can_trace_absent,
    capture,
    extract,
    for_absent_card,
    one_at_a_time,
    rehearse,
)
from graphs.costs import CostModel, NodeCosts, default_costs, finish_measuring
from graphs.fsdp import Sharding, groups_of, sharded
from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.meta import GraphMeta
from graphs.pipeline import Pipeline, with_pipeline
from graphs.rewrites import (
    Variant,
    Variants,
    offered,
    program_with,
    rewrites_program,
    rewritten,
    variants_of,
)
from graphs.training_step import (
    GivenOptimizer,
    MetaOutputs,
    OutsideLoss,
    check_stage,
    indices_with_gradient,
    optimizer_costs,
    with_accumulation,
    with_device_bytes,
    with_optimizer,
)

__all__ = ["CapturedStep", "TraceError", "trace", "trace_module", "trace_variants"]

GRADIENTS = ("fresh", "accumulate")
OF_MICRO_BATCHES = "accumulate, inputs fresh"
"""The gradients of a pipeline's micro-batches: those of the parameters add up, and those of the
inputs, which each micro-batch has its own of, do not."""


@dataclass(frozen=True)
class CapturedStep:
    """The captured program and its graph: what `apply` needs to run a schedule."""

    captured: Capture
    layout: Layout
    graph: Graph
    _original: Capture = field(repr=False)
    _costs: CostModel | None = field(repr=False)
    _extracted: Callable[[Capture, Variant, CostModel | None], CapturedStep] = field(repr=False)

    def with_rewrites(self, rewrites: Iterable[str]) -> CapturedStep:
        """Another variant of the same step, without tracing again."""
        wanted = tuple(rewrites)
        if wanted == tuple(self.graph.meta.rewrites):
            return self
        return self._extracted(program_with(self._original, wanted), wanted, self._costs)

    def with_costs(self, costs: CostModel | None) -> CapturedStep:
        """The same step with other seconds and workspace, without tracing again."""
        return self._extracted(self.captured, tuple(self.graph.meta.rewrites), costs)

    def variants(self, wanted: Iterable[Variant]) -> list[CapturedStep]:
        """The plain step, and those variants of it whose rewrites of the program find something."""
        steps = [self.with_rewrites(())]
        for variant in dict.fromkeys(wanted):
            program = program_with(self._original, variant)
            finds = program is not self._original or not rewrites_program(variant)
            if variant and finds:
                steps.append(self._extracted(program, variant, self._costs))
        return steps


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

    rewrites: a word of `graphs.rewrites.WORDS`. A sharded step has none.
    The rest is as for `trace`.

    Raises what `trace` raises; ValueError for another word.
    """
    planned = variants_of(rewrites, sharded=fsdp is not None)
    traced = _traced(model, batch, lambda step: step.variants(planned), fsdp=fsdp, **options)
    found = offered([(graph, step.captured) for graph, step in traced.variants], planned)
    captured = traced.variants[0][1].captured
    kept = KeptCapture.of(model, traced.call, captured, device=traced.device)
    return replace(found, kept=kept)


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
    _refuse_replaced(model)
    args, kwargs = as_call(batch, inputs)
    check_call(model, args, kwargs)
    call = Call.of(args, kwargs, order=argument_order(model.forward))
    if pipeline is not None:
        check_stage(model, call, pipeline, has_loss=loss is not None, is_sharded=fsdp is not None)
        if pipeline.n_microbatches > 1:
            gradients = OF_MICRO_BATCHES
    card = NodeCosts(costs).hardware
    target = _device(model, call, device, card)
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
        )
    if step.captured.opaque and fsdp is not None:
        part = step.captured.opaque[0]
        raise TraceError(f"{part.path!r} cannot be planned for sharded steps: {part.why}")
    rehearsed = rehearse(model, call, step.captured, step.layout, device=target)
    loss_layout = outside.extracted(cost=NodeCosts(costs)) if outside else None
    sharding = Sharding(n_ranks=fsdp) if isinstance(fsdp, int) else fsdp
    groups = None if sharding is None else groups_of(model, sharding)
    n_ranks = 1 if sharding is None else sharding.n_ranks
    where: dict[str, Any] = {"device": target, "costs": costs, "n_ranks": n_ranks}
    optimizer_cost = None if optimizer is None else optimizer_costs(optimizer, model, **where)

    def whole(step: CapturedStep) -> Graph:
        graph = _as_rehearsed(step.graph, rehearsed)
        if outside is not None and loss_layout is not None:
            graph = outside.insert(graph, step.captured, step.layout, loss_layout)
        if groups is not None:
            on_cpu = target.type == "cpu" and not hardware.is_cuda(costs.description)
            graph = sharded(graph, n_ranks=n_ranks, groups=groups, on_cpu=on_cpu)
        if optimizer_cost is not None:
            graph = with_optimizer(graph, optimizer_cost)
        graph = with_pipeline(graph, pipeline)
        own = checkpoints_itself.is_set()
        return replace(graph, meta=replace(graph.meta, own_checkpoints=True)) if own else graph

    steps = choose(step)
    graphs = [whole(each) for each in steps]
    finish_measuring(costs)
    return _Traced(list(zip(graphs, steps, strict=True)), call, target)


def _as_rehearsed(graph: Graph, rehearsed: Rehearsed) -> Graph:
    in_place = [*graph.meta.in_place, *rehearsed.in_place]
    meta = replace(graph.meta, in_place=in_place, dropped=dict(rehearsed.dropped))
    return replace(graph, meta=meta)


def _refuse_replaced(model: nn.Module) -> None:
    """Raise TraceError for modules whose forward has been replaced, compiled or planned."""
    from torch._dynamo import OptimizedModule  # takes a second to import

    name = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            part = f"its submodule {path} is" if path else "the module is"
            raise TraceError(
                f"{name} cannot be traced: {part} compiled by torch.compile; pass the original "
                "module (model._orig_mod)"
            )
    refuse_plans(model)


def refuse_plans(model: nn.Module, *, also_its_own: bool = True) -> None:
    """Raise TraceError where something planned replaces a forward pass that would be traced.

    Such a replacement has a method `why_not_traced(title)` that returns the reason.

    also_its_own: False where the module's own plan traces it.
    """
    for path, module in model.named_modules():
        why_not = getattr(module.__dict__.get("forward"), "why_not_traced", None)
        if why_not is not None and (path or also_its_own):
            title = f"its submodule {path}" if path else "it"
            raise TraceError(f"{type(model).__name__} cannot be traced: {why_not(title)}")


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
) -> CapturedStep:
    """Trace the module alone, without outside loss and optimizer. `costs=None`: all zero.

    opaque: of the environment of a plan for this step.
    known: the traced program, where there is one already (`KeptCapture`).
    """
    if device is not None:
        refuse_other(device)
    captured = known
    if captured is None:
        captured = capture(model, call, device=device, choose=choose, planned=opaque)
    original = captured

    def extracted(program: Capture, variant: Variant, costs: CostModel | None) -> CapturedStep:
        cost = NodeCosts(costs)
        layout = rewritten(extract(program, cost=cost), variant)
        graph = _graph(
            model, call, program, layout, variant, device=device, gradients=gradients, cost=cost
        )
        return CapturedStep(program, layout, graph, original, costs, extracted)

    variant = tuple(rewrites)
    return extracted(program_with(original, variant), variant, costs)


def _graph(
    model: nn.Module,
    call: Call,
    captured: Capture,
    layout: Layout,
    rewrites: Variant,
    *,
    device: torch.device | None,
    gradients: str,
    cost: NodeCosts,
) -> Graph:
    """One variant of a captured step."""
    arguments = tensor_names(call, model)
    tensors_of: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    for placeholder, source in captured.sources.items():
        name = arguments[source.index] if source.kind == "input" else source.name
        tensors_of.setdefault(source.kind, {})[name] = placeholder.name
    graph = Graph(
        nodes=tuple(layout.nodes),
        tensors=tuple(layout.tensors),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(
            model=type(model).__name__,
            rewrites=list(rewrites),
            gradients=gradients,
            parameters=tensors_of["parameter"],
            buffers=tensors_of["buffer"],
            inputs=tensors_of["input"],
            parameter_layout=_parameter_layout(model, captured, layout),
            in_place=list(layout.in_place),
            gradient_sums=list(layout.sums),
            backward_functions=[nodes for nodes in layout.functions.values() if len(nodes) > 1],
            parameter_bytes=bytes_by_dtype(model),
            dtypes=_dtypes(layout),
            parameter_forms=parameter_forms(model),
            buffer_forms=buffer_forms(model),
            input_forms=input_forms(call.tensors),
            costs=cost.description,
            no_cache=bool(caching_configs(model)),
            environment={
                **environment_of(call, model, device=device),
                "device": "cpu" if device is None else device.type,
                "gradients": gradients,
                "gradient_outputs": list(captured.gradient_outputs),
                "values_read": _values_read(captured),
                **(
                    {"opaque": [each.described() for each in captured.opaque]}
                    if captured.opaque
                    else {}
                ),
            },
        ),
    )
    if gradients != "fresh":
        added = {
            new: layout.storage[leaf]
            for leaf, new in layout.gradients.items()
            if gradients == "accumulate" or captured.sources[leaf].kind != "input"
        }
        graph = with_accumulation(graph, added)
    return with_device_bytes(graph, cost.hardware)


def _dtypes(layout: Layout) -> dict[str, list[str]]:
    """dtype -> storages, but those that exist before the step."""
    before = ("parameter", "buffer", "input", "optimizer_state")
    found: dict[str, list[str]] = {}
    for tensor in layout.tensors:
        if tensor.kind not in before and tensor.name in layout.dtypes:
            found.setdefault(layout.dtypes[tensor.name], []).append(tensor.name)
    return found


def _values_read(captured: Capture) -> list[dict[str, Any]]:
    """What the module read of the batch and its buffers, each once."""
    found: list[dict[str, Any]] = []
    for guard in captured.guards:
        if (described := guard.described()) not in found:
            found.append(described)
    return found


def _parameter_layout(
    model: nn.Module, captured: Capture, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What sharding needs to know of each parameter: shape, bytes of an element, its tensor in the
    graph, and that of its gradient (None: it has none)."""
    parameters = dict(model.named_parameters())
    return {
        source.name: {
            "shape": list(parameters[source.name].shape),
            "element_bytes": parameters[source.name].element_size(),
            "tensor": node.name,
            "gradient": layout.gradients.get(node),
        }
        for node, source in captured.sources.items()
        if source.kind == "parameter" and source.name in parameters
    }


def loss_index(output: Any) -> tuple[int, ...]:
    """The index of the loss among the flat outputs of a model that returns it."""
    loss = find_loss(output)
    flat = nested.leaves(output)
    return (next(index for index, item in enumerate(flat) if item is loss),)


def refuse_other(device: torch.device) -> None:
    """Raise TraceError for a device other than cpu, cuda and meta."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise TraceError(
            f"the step is on {device}; steps are planned for cpu and cuda only, where the peak "
            "can be measured and random numbers replayed"
        )


def _device(
    model: nn.Module, call: Call, device: torch.device | str | None, card: Hardware | None
) -> torch.device:
    """The device of the step; meta tensors are planned as CPU tensors.

    card: that the costs are of, which can be traced for where it is not.
    """
    if device is not None:
        target = torch.device(device)
    else:
        state = [*model.parameters(), *model.buffers(), *call.tensors]
        kinds = {t.device for t in state if t.dim() > 0 or t.device.type != "cpu"}
        kinds = {d for d in kinds if d.type != "meta"} or {torch.device("cpu")}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise TraceError(
                f"model and batch are on several devices ({names}); move them to one: a plan is "
                "for one device"
            )
        target = kinds.pop()
    if target.type == "meta":
        target = torch.device("cpu")
    refuse_other(target)
    if target.type == "cuda" and not torch.cuda.is_available():
        if card is None or card.kind != "cuda":
            raise TraceError(
                "no CUDA device is available: to trace for one all the same, give the costs of a "
                "named card (costs=Roofline(named('h100'))), or name it to solve (device='h100')"
            )
        if not can_trace_absent():
            raise TraceError(
                "a graph for CUDA cannot be traced by this build of PyTorch without a card; trace "
                "on the CPU and plan with the named device's rates"
            )
        return torch.device("cuda", target.index or 0)
    return target
