"""A loss that the caller computes: its operators run between the forward and the backward pass.

The loss function is captured separately, on meta tensors in place of the model's outputs. Its nodes
are inserted into the model's graph with phase "outside": they take time and memory, run once, and
are never rescheduled. The model's own nodes keep the names that they get when it is traced alone,
as `apply` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphs.capture import Capture, Layout, Rehearsed, capture, extract, fake_output, rehearse
from graphs.costs import Cost
from graphs.graph import Graph, Node, with_function_lifetimes, with_saved
from graphs.model_calls import (
    Call,
    LayoutForShapes,
    TraceError,
    find_loss,
    nested,
    same_strides,
    strided_like,
)

PREFIX = "loss."


class MetaOutputs:
    """The model's output, with meta tensors in place of the real ones.

    positions: indices of the tensors among the model's flat outputs.
    tensors: these tensors, on the meta device, with the outputs' strides and requires_grad.
    """

    def __init__(self, model: nn.Module, call: Call, *, device: torch.device) -> None:
        flat, self._spec = nested.flatten(fake_output(model, call, device=device))
        self._flat = flat = nested.with_repeats_marked(flat)
        self.positions = [i for i, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        self.tensors = [
            strided_like(flat[i], "meta").requires_grad_(flat[i].requires_grad)
            for i in self.positions
        ]

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's output, built from these tensors. It is a new object each time, since a loss
        function may modify it."""
        values = iter(tensors)
        flat = [next(values) if isinstance(x, torch.Tensor) else x for x in self._flat]
        return nested.unflatten(nested.with_repeats_restored(flat), self._spec)

    def index_returned_by(self, loss: Callable[[Any, Any], torch.Tensor], batch: Any) -> int | None:
        """The index of the flat output that the loss function returns unchanged, as `lambda output,
        batch: output.loss` does; None if it computes something.
        """
        meta_batch = nested.map_tensors(lambda t: t.to("meta"), batch)
        value = None
        # errors are reported, with their location, when the function is captured
        with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
            value = loss(self.output(self.tensors), meta_batch)
        for position, tensor in zip(self.positions, self.tensors, strict=True):
            if value is tensor:
                find_loss(value)  # raises TraceError if it cannot be a loss
                return position
        return None


@dataclasses.dataclass(frozen=True)
class LossLayout:
    """The nodes and tensors of a loss, as eager mode runs them.

    The caller runs these nodes in eager mode even if the model runs a plan. So what eager mode
    overwrites, holds longer or drops early is part of the graph itself. For the model's own nodes
    it is added only for the baseline (`graphs.graph.eager_memory`), since a plan runs them one by
    one.

    layout: a node that overwrites its input has no output; the tensors that occupy one storage one
        after the other have a single name.
    dropped: as `Rehearsed.dropped`, with these names.
    """

    layout: Layout
    dropped: Mapping[str, str]

    @classmethod
    def of(cls, layout: Layout, rehearsed: Rehearsed) -> LossLayout:
        """The layout of a loss with what the rehearsal found.

        layout: as extracted, in which each node makes a tensor of its own.
        """
        nodes_with_saved = with_saved(layout.nodes, rehearsed.saved)
        layout = dataclasses.replace(layout, nodes=list(nodes_with_saved))
        final = _final_names(layout, rehearsed.in_place)
        nodes = []
        for node in layout.nodes:  # an output that is now the same tensor as an input is dropped
            inputs = tuple(dict.fromkeys(final.get(name, name) for name in node.inputs))
            outputs = (final.get(name, name) for name in node.outputs)
            new_outputs = tuple(name for name in outputs if name not in inputs)
            nodes.append(dataclasses.replace(node, inputs=inputs, outputs=new_outputs))
        storage = {node: final.get(name, name) for node, name in layout.storage.items()}
        tensors = [tensor for tensor in layout.tensors if tensor.name not in final]
        dropped = {final.get(name, name): node for name, node in rehearsed.dropped.items()}
        layout = dataclasses.replace(layout, nodes=nodes, tensors=tensors, storage=storage)
        return cls(layout, dropped)


class OutsideLoss:
    """The captured loss function of one model and batch.

    loss: the function of (output, batch).
    batch: the whole batch.
    outputs: the model's output.
    call: how the model is called with the batch.
    device: the device of the step.
    choose: picks the loss from what the function returns, as for `capture`.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], torch.Tensor],
        batch: Any,
        outputs: MetaOutputs,
        call: Call,
        *,
        device: torch.device,
        choose: Callable[[Any], tuple[int, ...]],
    ) -> None:
        self._positions = outputs.positions
        # the loss may read parts of the batch that the model does not take (the targets)
        index = {id(tensor): i for i, tensor in enumerate(call.tensors)}
        self._batch = [index.get(id(item)) for item in nested.tensors(batch)]
        output_call = Call.of((outputs.tensors, batch), {})
        self._function, self._call, self._device = LossFunction(loss, outputs), output_call, device
        self.captured: Capture = capture(self._function, output_call, device=device, choose=choose)

    def gradient_outputs(self) -> tuple[int, ...]:
        """Indices of the model's flat outputs that get a gradient from the loss."""
        with_gradient = self._input_gradients()
        return tuple(p for i, p in enumerate(self._positions) if i in with_gradient)

    def _input_gradients(self) -> dict[int, fx.Node]:
        """Index of a tensor input of the loss -> fx node of the gradient that the loss returns."""
        return {
            self.captured.sources[node].index: gradient
            for node, gradient in self.captured.gradients.items()
            if self.captured.sources[node].kind == "input"
        }

    def gradient_layouts(self) -> dict[int, LayoutForShapes]:
        """Index of a flat output of the model -> layout of the gradient that the loss returns for
        it, if it differs from the output's.

        Expanded gradients are missing: `insert` copies them into the output's layout, and sums over
        them stay the same.
        """
        found = {}
        for node, gradient in self.captured.gradients.items():
            source, own, made = self.captured.sources[node], node.meta["val"], gradient.meta["val"]
            if source.kind != "input" or source.index >= len(self._positions):
                continue
            if 0 in made.stride() or same_strides(own.shape, own.stride(), made.stride()):
                continue
            found[self._positions[source.index]] = LayoutForShapes.of(made)
        return found

    def extract_layout(self, *, cost: Callable[[fx.Node], Cost]) -> LossLayout:
        """The nodes of the loss as the caller runs them, which is in eager mode even if the model
        runs a plan."""
        plain = extract(self.captured, cost=cost)
        found = rehearse(self._function, self._call, self.captured, plain, device=self._device)
        return LossLayout.of(plain, found)

    def insert(self, graph: Graph, captured: Capture, layout: Layout, loss: LossLayout) -> Graph:
        """The model's graph with the nodes of the loss inserted after its forward nodes.

        graph, captured, layout: the model's graph, traced program and layout.
        loss: as `extract_layout` returns it.
        """
        loss_layout = loss.layout
        names = self._new_names(captured, layout, loss_layout)
        # first rename tensors of the loss to those of the model, then its gradients to tangents
        outside = [_as_outside_node(node, names) for node in loss_layout.nodes]
        made = {name for node in outside for name in node.outputs}
        tangents, copies = self._match_tangents(captured, loss_layout, names, made, graph)
        functions = ([PREFIX + name for name in each] for each in loss_layout.functions.values())
        outside = [_as_outside_node(node, tangents) for node in outside]
        dropped = {
            tangents.get(names[tensor], names[tensor]): PREFIX + node
            for tensor, node in loss.dropped.items()
        }
        outside = [*with_function_lifetimes(outside, functions, dropped=dropped), *copies]
        known = {tensor.name for tensor in graph.tensors}
        dtypes = {dtype: list(found) for dtype, found in graph.meta.dtypes.items()}
        extra = []
        for tensor in loss_layout.tensors:
            name = names.get(tensor.name, tensor.name)
            name = tangents.get(name, name)
            if name not in known:
                known.add(name)
                extra.append(dataclasses.replace(tensor, name=name, alias_of=None))
                if tensor.name in loss_layout.dtypes:
                    dtypes.setdefault(loss_layout.dtypes[tensor.name], []).append(name)
        kept = [names[n] for n in loss_layout.outputs if names[n] not in tangents]
        return dataclasses.replace(
            graph,
            nodes=(*graph.forward_nodes, *outside, *graph.later_nodes),
            tensors=(*graph.tensors, *extra),
            outputs=tuple(dict.fromkeys((*graph.outputs, *kept))),
            meta=dataclasses.replace(graph.meta, dtypes=dtypes).with_environment(loss="outside"),
        )

    def _new_names(self, captured: Capture, layout: Layout, loss_layout: Layout) -> dict[str, str]:
        """Tensor of the loss -> its name in the whole graph: that of a model output or of a tensor
        of the batch, or a new one."""
        names = {t.name: PREFIX + t.name for t in loss_layout.tensors}
        batch = {
            source.index: layout.storage[node]
            for node, source in captured.sources.items()
            if source.kind == "input"
        }
        n_outputs = len(self._positions)
        for node, source in self.captured.sources.items():
            if source.kind != "input":
                continue
            if source.index < n_outputs:
                value = captured.outputs[self._positions[source.index]]
                names[loss_layout.storage[node]] = layout.storage[value]
                continue
            index = self._batch[source.index - n_outputs]
            if index is not None:
                names[loss_layout.storage[node]] = batch[index]
        return names

    def _match_tangents(
        self,
        captured: Capture,
        loss_layout: Layout,
        names: dict[str, str],
        made: set[str],
        graph: Graph,
    ) -> tuple[dict[str, str], list[Node]]:
        """Identify the gradients that the loss returns with the model's tangents.

        Returns the gradients to rename (name -> name of the tangent), and nodes that copy all other
        gradients into their tangents: those that are expanded, are shared between outputs, have
        other strides than the tangent, or are not made by the loss.

        made: tensors that nodes of the loss make.
        """
        gradients = self._input_gradients()
        sizes = {names[t.name]: t.size_bytes for t in loss_layout.tensors}
        positions = {p: i for i, p in enumerate(self._positions)}
        renamed: dict[str, str] = {}
        copies: list[Node] = []
        for position, placeholder in captured.tangents.items():
            node = gradients[positions[position]]
            gradient = names[loss_layout.storage[node]]
            size_bytes = graph.tensor_by_name[placeholder.name].size_bytes
            value, tangent = node.meta["val"], placeholder.meta["val"]
            same_layout = same_strides(tangent.shape, value.stride(), tangent.stride())
            same_bytes = sizes[gradient] == size_bytes
            if gradient in made and gradient not in renamed and same_layout and same_bytes:
                renamed[gradient] = placeholder.name
                continue
            name = f"{PREFIX}contiguous_{placeholder.name}"
            read, written = (renamed.get(gradient, gradient),), (placeholder.name,)
            copies.append(Node(name, "aten.clone.default", read, written, 0.0, 0, "outside", False))
        return renamed, copies


class LossFunction(nn.Module):
    """A module around the loss function, so that it can be captured like a model."""

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor], outputs: MetaOutputs) -> None:
        super().__init__()
        self.loss = loss
        self.outputs = outputs

    def _get_name(self) -> str:
        """What messages call this module (`title_of`)."""
        return f"the loss function {getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def forward(self, tensors: Sequence[torch.Tensor], batch: Any) -> torch.Tensor:
        value = self.loss(self.outputs.output(tensors), batch)
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"the loss function of (output, batch) returned an object of type "
                f"{type(value).__name__}; it must return the loss as a tensor"
            )
        return value


def _as_outside_node(node: Node, names: dict[str, str]) -> Node:
    """The node as one of phase "outside", with a prefixed name and renamed tensors."""
    outside = node.phase == "outside"
    return dataclasses.replace(
        node,
        name=node.name if outside else PREFIX + node.name,
        inputs=tuple(dict.fromkeys(names.get(name, name) for name in node.inputs)),
        outputs=tuple(names.get(name, name) for name in node.outputs),
        phase="outside",
        recomputable=False,
    )


def _final_names(layout: Layout, in_place: Sequence[str]) -> dict[str, str]:
    """Tensor that is overwritten -> the last tensor on its storage.

    Considers only tensors that the loss's backward pass makes, overwritten by their last reader.
    All other in-place results count as new tensors, which can only overestimate memory.
    """
    made = {out for node in layout.nodes if node.phase == "backward" for out in node.outputs}
    last_reader = {name: node.name for node in layout.nodes for name in node.inputs}
    size_bytes = {tensor.name: tensor.size_bytes for tensor in layout.tensors}
    final: dict[str, str] = {}
    for node in reversed(layout.nodes):
        if node.name not in in_place or len(node.outputs) != 1 or not node.inputs:
            continue
        (out,), old = node.outputs, node.inputs[0]
        is_dying = last_reader[old] == node.name and old not in layout.outputs
        if is_dying and old in made and size_bytes[old] == size_bytes[out]:
            final[old] = final.get(out, out)
    return final
