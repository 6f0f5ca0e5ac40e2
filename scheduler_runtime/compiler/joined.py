"""Join a compiler's two halves of a step, forward and backward, into one Graph to plan.

PyTorch's partitioner has cut the joint graph already: it chose what the forward half saves, and
copied what is cheaper to recompute into the backward half. Here both halves become one fx graph
again, connected by the saved values. So the Graph's baseline is exactly what the compiler does by
itself, and a schedule says which of the saved values to drop and recompute.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphs.capture import Capture, Layout, Source, extract, is_random
from graphs.costs import CostModel, OpCall
from graphs.graph import RANDOM_STATE, Graph, GraphMeta
from graphs.model_calls import strided_like


@dataclass(frozen=True)
class Joined:
    """Both halves as one fx graph.

    module: returns the outputs of the forward half, then those of the backward half.
    n_outputs: how many of these outputs are the forward half's.
    saved: the values that the forward half saves for backward, as the compiler chose them.
    tangents: the placeholders of incoming gradients.
    overwritten: names of the inputs that the step overwrites: buffers.
    graph: the Graph to plan.
    layout: the fx node or storage for each name in the graph.
    """

    module: fx.GraphModule
    n_outputs: int
    saved: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    overwritten: frozenset[str]
    graph: Graph
    layout: Layout

    def bytes_of(self, saved: Collection[fx.Node]) -> int:
        """Bytes of these values' storages, each counted once, without the step's inputs."""
        resident = {tensor.name for tensor in self.graph.resident}
        storages = {self.layout.storage.get(node) for node in saved} - resident - {None}
        return sum(self.graph.tensor_by_name[name].size_bytes for name in storages if name)


def join(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    n_outputs: int,
    static_inputs: Collection[int],
    costs: CostModel,
) -> Joined:
    """Join the two halves and make a Graph of them.

    n_outputs: how many of the forward half's outputs the caller gets; the other ones are saved.
    static_inputs: positions of inputs that stay between steps (parameters, buffers).
    costs: seconds and workspace of each operator
        (`scheduler_runtime.compiler.fused_costs.FusedCosts`).

    Raises TraceError if sizes depend on the data or are symbolic.
    """
    halves = _Halves(forward, backward, n_outputs=n_outputs)
    _separate_storages(halves.graph)
    capture = _as_capture(halves, set(static_inputs))
    layout = extract(
        capture,
        cost=lambda node: costs.cost(OpCall.from_node(node)),
    )

    def may_recompute(name: str) -> bool:
        call = layout.calls.get(name)
        if call is None:
            return True
        schema = getattr(call.target, "_schema", None)  # none: a higher-order operator
        return schema is not None and not schema.is_mutable and not is_random(call)

    # Autograd copies gradients only after the compiled backward pass has returned all of them.
    in_order = sorted(layout.nodes, key=lambda node: node.name in layout.copies)
    graph = Graph(
        nodes=tuple(
            dataclasses.replace(node, recomputable=node.recomputable and may_recompute(node.name))
            for node in in_order
        ),
        # nothing random is recomputed, so no random state is kept
        tensors=tuple(tensor for tensor in layout.tensors if tensor.name != RANDOM_STATE),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(model="compiled", costs=dict(costs.description)),
    )
    return Joined(
        module=halves.module,
        n_outputs=n_outputs,
        saved=tuple(halves.saved),
        tangents=tuple(halves.tangents),
        overwritten=frozenset(node.name for node in capture.mutations),
        graph=graph,
        layout=layout,
    )


class _Halves:
    """Copies both halves into one graph; each node's copy has its own metadata."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *, n_outputs: int
    ) -> None:
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self.tangents: list[fx.Node] = []
        outputs, descriptions = self._copy(forward, {}, is_backward=False)
        self.returned, saved = outputs[:n_outputs], outputs[n_outputs:]
        self.saved = list(dict.fromkeys(node for node in saved if isinstance(node, fx.Node)))
        # the backward half's placeholders have the names of the values that the forward half saves
        names = [getattr(node, "name", "") for node in _outputs_of(forward)[n_outputs:]]
        self.gradients, of_gradients = self._copy(
            backward, dict(zip(names, saved, strict=True)), is_backward=True
        )
        output = self.graph.output((*self.returned, *self.gradients))
        output.meta["desc"] = [*descriptions[:n_outputs], *of_gradients]
        attributes = {
            node.target: operator.attrgetter(str(node.target))(half)
            for half in (forward, backward)
            for node in half.graph.find_nodes(op="get_attr")
        }
        self.module = fx.GraphModule(attributes, self.graph)

    def _copy(
        self, half: fx.GraphModule, saved: dict[str, Any], *, is_backward: bool
    ) -> tuple[list[Any], list[Any]]:
        """Copy a half; returns its outputs and their descriptions.

        saved: name of a placeholder of the backward half -> the copy of the saved value.
        """
        copies: dict[fx.Node, fx.Node] = {}
        for node in half.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder" and node.name in saved:
                copies[node] = saved[node.name]
                continue
            copy = self.graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                copy.name = copy.target = node.name
                (self.tangents if is_backward else self.inputs).append(copy)
            elif is_backward:
                copy.meta["partitioner_tag"] = "is_backward"
            elif copy.meta.get("partitioner_tag") == "is_backward":
                del copy.meta["partitioner_tag"]
            copies[node] = copy
        outputs = _outputs_of(half)
        descriptions = list(half.graph.output_node().meta.get("desc", [None] * len(outputs)))
        return [copies[v] if isinstance(v, fx.Node) else v for v in outputs], descriptions


def _outputs_of(half: fx.GraphModule) -> list[Any]:
    return pytree.arg_tree_leaves(*half.graph.output_node().args)


def _separate_storages(graph: fx.Graph) -> None:
    """Make fake values share storage exactly where the real ones do: a view with its base.

    Passes over the joint graph insert nodes whose fake values have new storages, even for views. On
    the other hand, values that the backward half recomputes have the same fake value as in the
    forward half.
    """
    seen: set[int] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta.get("val"))
            arguments = _fakes((args, kwargs))
            schema = getattr(node.target, "_schema", None)
            returns = () if schema is None or schema.is_mutable else schema.returns
            if arguments and any(returned.alias_info is not None for returned in returns):
                # a view: run it on the fake values, so that it shares its base's storage
                with arguments[0].fake_mode:
                    node.meta["val"] = node.target(*args, **kwargs)
            else:  # a new tensor: its storage must not be that of an unrelated node
                unrelated = seen - set(map(_storage_id, arguments))

                def with_own_storage(
                    fake: FakeTensor, unrelated: set[int] = unrelated
                ) -> FakeTensor:
                    if _storage_id(fake) not in unrelated:
                        return fake
                    with fake.fake_mode:
                        return strided_like(fake)  # type: ignore[return-value]

                value = node.meta.get("val")
                node.meta["val"] = pytree.tree_map_only(FakeTensor, with_own_storage, value)
            for part in node.users:
                if part.target is operator.getitem:
                    part.meta["val"] = node.meta["val"][part.args[1]]
        seen.update(map(_storage_id, _fakes(node.meta.get("val"))))


def _fakes(items: Any) -> list[FakeTensor]:
    return [item for item in pytree.tree_leaves(items) if isinstance(item, FakeTensor)]


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _as_capture(halves: _Halves, static_inputs: set[int]) -> Capture:
    """The joined graph as a Capture, for `graphs.capture.extract`."""
    sources: dict[fx.Node, Source] = {}
    for index, node in enumerate(halves.inputs):
        kind = "parameter" if index in static_inputs else "input"
        sources[node] = Source(kind, f"{kind}.{index}", index)
    for index, node in enumerate(halves.tangents):
        sources[node] = Source("tangent", f"tangent.{index}", index)
    return Capture(
        graph=halves.graph,
        module=halves.module,
        sources=sources,
        outputs=tuple(halves.returned),
        output_spec=pytree.tree_flatten(())[1],
        gradient_outputs=(),
        differentiable=(),
        tangents=dict(enumerate(halves.tangents)),
        gradients={
            placeholder: gradient
            for placeholder, gradient in zip(halves.inputs, halves.gradients, strict=False)
            if isinstance(gradient, fx.Node) and gradient.op != "placeholder"
        },
        mutations=_mutations(halves),
        guards=(),
        held=(),
    )


def _mutations(halves: _Halves) -> dict[fx.Node, fx.Node]:
    """Input that the step overwrites -> the value that it writes.

    Either the graph itself copies the value into the input, or the value is an output whose
    description names the input that the runtime will copy it to.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in halves.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written, value = node.args[:2]
        if written in halves.inputs and isinstance(value, fx.Node):
            found[written] = value
    descriptions = halves.graph.output_node().meta["desc"]
    described = {node.meta["desc"]: node for node in halves.inputs if "desc" in node.meta}
    for value, description in zip(halves.returned, descriptions, strict=False):
        target = described.get(getattr(description, "mutated_input", None))
        if target is not None and isinstance(value, fx.Node):
            found[target] = value
    return found
