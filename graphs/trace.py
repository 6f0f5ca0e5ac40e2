"""From a PyTorch model and a batch to the Graph of one training step.

    graph = trace(model, batch, optimizer=optimizer)

The step is: forward, loss, backward, optimizer. `graphs.capture.joint_graph` records it on fake
tensors, `graphs.capture.extraction` folds views away, `graphs.costs.models` says what each operator
costs, and here the rest of the step is put around it: a loss that the caller computes,
accumulation, the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.calls import (
    Call,
    TraceError,
    argument_order,
    as_call,
    check_call,
    environment_of,
    find_loss,
    nested,
)
from graphs.capture import Capture, Layout, at_each_checkpoint, capture, extract, one_at_a_time
from graphs.costs import Cost, CostModel, Measured, OpCall, default_costs, finish_measuring
from graphs.fsdp import Sharding, groups_of, sharded
from graphs.graph import Graph
from graphs.meta import GraphMeta
from graphs.training_step import (
    MetaOutputs,
    OutsideLoss,
    optimizer_figures,
    with_accumulation,
    with_optimizer,
)

__all__ = ["CapturedStep", "TraceError", "trace", "trace_module"]

GRADIENTS = ("fresh", "accumulate")


@dataclass(frozen=True)
class CapturedStep:
    """The captured program beside its graph: what `apply` needs to run a schedule of it."""

    captured: Capture
    layout: Layout
    graph: Graph


@one_at_a_time
def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    gradients: str = "fresh",
    device: torch.device | str | None = None,
    costs: CostModel | None = None,
    fsdp: int | Sharding | None = None,
) -> Graph:
    """Trace one training step into a cost/memory Graph; nothing is allocated or changed.

    model: real, fake or on the meta device. The ambient autocast and its train/eval state are
        those of the step.
    batch: a tensor is called as model(x), a tuple as model(*x), a dict as model(**x).
    loss: None: the model returns the loss (a scalar, `.loss`, or the only scalar of a tuple).
        A function of (output, batch): the caller computes the loss; its operators are counted
        (phase "outside"), and no schedule touches them. If it only picks what the model has
        computed (`output.loss`), the loss is the model's.
    inputs: a function of the batch: what of it the model is called with (`lambda batch: batch[0]`;
        the rest, the targets, is for the loss). None: the model is called with all of it.
    optimizer: its state and the memory of its step are counted; None: no optimizer.
    gradients: "fresh": set to None before the step; "accumulate": there from the start.
    device: where the tensors of the graph stand (default: where the model's are; meta means CPU).
    costs: seconds and workspace of each operator (default: measured on a CUDA device, on the CPU
        the roofline of a generic one).
    fsdp: the step as one rank of FSDP2 sees it (`graphs.fsdp.transform`): a number of ranks, each
        block of the model being a group by itself, or a Sharding. `batch` is that of one rank.

    Raises TraceError, saying what cannot be traced and why; ShardingError for groups that cannot
    be.
    """
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}; one of {', '.join(GRADIENTS)}")
    _refuse_replaced(model)
    args, kwargs = as_call(batch, inputs)
    check_call(model, args, kwargs)
    call = Call.of(args, kwargs, order=argument_order(model.forward))
    target = _device(model, call, device)
    if costs is None:
        costs = default_costs(target)
    outside: OutsideLoss | None = None
    choose: Callable[[Any], tuple[int, ...]] = loss_index
    if loss is not None:
        stand_ins = MetaOutputs(model, call, device=target)
        picked = stand_ins.returned_by(loss, batch)
        if picked is None:
            outside = OutsideLoss(loss, batch, stand_ins, call, device=target, choose=loss_index)
            choose = _always(outside.gradient_outputs())
        else:
            choose = _always((picked,))
    checkpoints_itself = threading.Event()
    with at_each_checkpoint(checkpoints_itself.set):
        step = trace_module(
            model, call, device=target, choose=choose, gradients=gradients, costs=costs
        )
    graph = step.graph
    if outside is not None:
        loss_layout = extract(outside.captured, cost=_Asked(costs))
        graph = outside.insert(step.graph, step.captured, step.layout, loss_layout)
    n_ranks = 1
    if fsdp is not None:
        sharding = fsdp if isinstance(fsdp, Sharding) else Sharding(n_ranks=fsdp)
        n_ranks = sharding.n_ranks
        graph = sharded(
            graph,
            n_ranks=n_ranks,
            groups=groups_of(model, sharding),
            on_cpu=target.type == "cpu" and not hardware.is_cuda(costs.description),
        )
    if optimizer is not None:
        figures = optimizer_figures(optimizer, model, device=target, costs=costs, n_ranks=n_ranks)
        graph = with_optimizer(graph, figures)
    finish_measuring(costs)
    if checkpoints_itself.is_set():
        graph = replace(graph, meta=replace(graph.meta, own_checkpoints=True))
    return graph


def _refuse_replaced(model: nn.Module) -> None:
    """Modules whose forward pass is no longer what their code says."""
    from torch._dynamo import OptimizedModule  # takes a second to import

    name = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            part = f"its submodule {path} is" if path else "the module is"
            raise TraceError(
                f"{name} cannot be traced: {part} compiled by torch.compile; give the module that "
                "was compiled (model._orig_mod)"
            )
    refuse_plans(model)


def refuse_plans(model: nn.Module, *, also_its_own: bool = True) -> None:
    """Raise TraceError where something planned replaces a forward pass that would be traced.

    A replaced `forward` says so by a method `why_not_traced(title)` that returns the reason.

    also_its_own: False for whoever traces the module from within its own plan.
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
) -> CapturedStep:
    """Trace the module alone: no loss outside of it, no optimizer. `costs=None`: all zero."""
    if device is not None:
        refuse_other(device)
    captured = capture(model, call, device=device, choose=choose)
    cost = _Asked(costs)
    layout = extract(captured, cost=cost)
    tensors_of: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    for source_node, source in captured.sources.items():
        tensors_of.setdefault(source.kind, {})[source.name] = source_node.name
    graph = Graph(
        nodes=tuple(layout.nodes),
        tensors=tuple(layout.tensors),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(
            model=type(model).__name__,
            gradients=gradients,
            parameters=tensors_of["parameter"],
            buffers=tensors_of["buffer"],
            parameter_layout=_parameter_layout(model, captured, layout),
            in_place=list(layout.in_place),
            gradient_sums=list(layout.sums),
            backward_functions=[nodes for nodes in layout.functions.values() if len(nodes) > 1],
            parameter_bytes=_bytes_by_dtype(model),
            parameter_forms=parameter_forms(model),
            buffer_forms=buffer_forms(model),
            input_forms=input_forms(call.tensors),
            costs=cost.description,
            environment={
                **environment_of(call, model, device=device),
                "device": _kind_of(device),
                "gradients": gradients,
                "gradient_outputs": list(captured.gradient_outputs),
            },
        ),
    )
    if gradients == "accumulate":
        added = {new: layout.storage[leaf] for leaf, new in layout.gradients.items()}
        graph = with_accumulation(graph, added)
    return CapturedStep(captured=captured, layout=layout, graph=graph)


def parameter_forms(model: nn.Module) -> dict[str, str]:
    """What people call each parameter: "float32 [5, 32]", "float32 [5, 32], frozen"."""
    return {
        name: _form(parameter) + ("" if parameter.requires_grad else ", frozen")
        for name, parameter in model.named_parameters()
    }


def _parameter_layout(
    model: nn.Module, captured: Capture, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What a step that is shared out over several devices is made of: of each parameter its shape,
    the bytes of an element, its tensor in the graph, and that of its gradient (None: it has none).
    """
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


def buffer_forms(model: nn.Module) -> dict[str, str]:
    """The same of each buffer."""
    return {name: _form(buffer) for name, buffer in model.named_buffers()}


def input_forms(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The same of each tensor of a call, with what is unlike a usual batch."""
    forms = []
    for tensor in tensors:
        words = [_form(tensor)]
        if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            words.append("expanded (one row in memory for many)")
        elif not tensor.is_contiguous():
            words.append(f"strides {list(tensor.stride())}")
        if tensor.requires_grad:
            words.append("requires a gradient")
        forms.append(", ".join(words))
    return forms


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters by dtype name: shown in the advice, never compared."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
    return sizes


def _always(chosen: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
    return lambda _output: chosen


class _Asked:
    """What each node costs; adds up what the roofline says beside what was measured."""

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._measured_s = 0.0
        self._roofline_s = 0.0

    def __call__(self, node: torch.fx.Node) -> Cost:
        if self._costs is None:
            return Cost(time_s=0.0)
        call = OpCall.from_node(node)
        cost = self._costs.cost(call)
        if isinstance(self._costs, Measured):
            self._measured_s += cost.time_s
            self._roofline_s += self._costs.roofline.cost(call).time_s
        return cost

    @property
    def description(self) -> dict[str, Any]:
        """measured_s, roofline_s: of all the operators, one run each; where they are measured."""
        if self._costs is None:
            return {}
        described = dict(self._costs.description)
        if isinstance(self._costs, Measured):
            described |= {"measured_s": self._measured_s, "roofline_s": self._roofline_s}
        return described


def loss_index(output: Any) -> tuple[int, ...]:
    """The model returns the loss: which of its flat outputs is it."""
    loss = find_loss(output)
    flat = nested.leaves(output)
    return (next(index for index, item in enumerate(flat) if item is loss),)


def _kind_of(device: torch.device | None) -> str:
    return "cpu" if device is None else device.type


def refuse_other(device: torch.device) -> None:
    """Raise TraceError for a device whose steps nobody can plan."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise TraceError(
            f"the step is on {device}; steps are planned for cpu and cuda alone, where the peak "
            "can be measured and random numbers be drawn again"
        )


def _device(model: nn.Module, call: Call, device: torch.device | str | None) -> torch.device:
    """One device for the whole step; meta tensors are planned as if they were on the CPU."""
    if device is not None:
        target = torch.device(device)
    else:
        state = [*model.parameters(), *model.buffers(), *call.tensors]
        kinds = {t.device for t in state if t.dim() > 0 or t.device.type != "cpu"}
        kinds = {d for d in kinds if d.type != "meta"} or {torch.device("cpu")}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise TraceError(
                f"model and batch are on several devices ({names}); "
                "a plan is for one device: move them together"
            )
        target = kinds.pop()
    if target.type == "meta":
        target = torch.device("cpu")
    refuse_other(target)
    if target.type == "cuda" and not torch.cuda.is_available():
        # Fake CUDA tensors abort a CPU-only build's process beyond any `except`.
        raise TraceError(
            "a graph for CUDA can only be traced where CUDA is available; trace on the CPU and "
            "plan with the named device's rates"
        )
    return target
