"""From a compiler's two halves of a step, forward and backward, to one Graph to plan on.

PyTorch's partitioner has cut the joint graph already: what its backward half reads from the forward
half is saved, what is cheaper to compute again than to read it computes again. Here both halves are
joined to one line again, the saved values being the wires between them. So the Graph's baseline is
what the compiler does by itself, node by node, and a schedule of it says which of the saved values
to drop and what to run again for them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphs.capture import Capture, Layout, Source, extract, is_random
from graphs.costs import CostModel, OpCall
from graphs.graph import Graph
from graphs.meta import GraphMeta

_BACKWARD = "is_backward"


@dataclass(frozen=True)
class Joined:
    """Both halves on one line.

    module: the line, its output that of the forward half and then that of the backward half.
    n_outputs: how many of them are the forward half's. saved: the values of the forward half that
    the backward half reads, as the compiler chose them. tangents: what comes in for the backward
    half. graph, layout: the problem, and what its
    names are on the line.
    """

    module: fx.GraphModule
    n_outputs: int
    saved: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    graph: Graph
    layout: Layout

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages that are saved and not there anyway, each once."""
        return saved_bytes_of(self, self.saved)


def saved_bytes_of(joined: Joined, saved: Collection[fx.Node]) -> int:
    """Bytes of the storages of these values of the line, but for those of its inputs."""
    resident = {tensor.name for tensor in joined.graph.resident}
    storages = {joined.layout.storage.get(node) for node in saved} - resident - {None}
    return sum(joined.graph.tensor_by_name[name].size_bytes for name in storages if name)


def join(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    n_outputs: int,
    static_inputs: Collection[int],
    costs: CostModel,
) -> Joined:
    """The two halves as one line and as a Graph.

    n_outputs: of the forward half's outputs those that the caller gets; the others are saved.
    static_inputs: positions of inputs that live on between steps (parameters, buffers).
    costs: seconds and workspace of each operator
    (`scheduler_runtime.compiler.fused_costs.FusedCosts`).

    Raises TraceError where sizes depend on the data or on symbols.
    """
    line = _Line(forward, backward, n_outputs=n_outputs)
    _settle_storages(line.graph)
    captured = _as_capture(line, static_inputs)
    layout = extract(captured, cost=lambda node: costs.cost(OpCall.from_node(node)))
    nodes = tuple(
        dataclasses.replace(
            node, recomputable=node.recomputable and not _has_effect(layout.calls[node.name])
        )
        if node.name in layout.calls
        else node
        for node in layout.nodes
    )
    random_state = {"random_state"}  # nothing random runs again, so no state is kept
    graph = Graph(
        nodes=nodes,
        tensors=tuple(t for t in layout.tensors if t.name not in random_state),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(model="compiled", costs=dict(costs.description)),
    )
    return Joined(
        module=line.module,
        n_outputs=n_outputs,
        saved=tuple(line.saved),
        tangents=tuple(line.tangents),
        graph=graph,
        layout=layout,
    )


class _Line:
    """Copies both halves into one graph; each copy has metadata of its own."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *, n_outputs: int
    ) -> None:
        self.graph = fx.Graph()
        self.saved: list[fx.Node] = []
        self.inputs: list[fx.Node] = []
        self.tangents: list[fx.Node] = []
        outputs, descriptions = _outputs_of(forward)
        values = self._copy_half(forward, {}, is_backward=False)
        saved = {
            node.name: values[node] for node in outputs[n_outputs:] if isinstance(node, fx.Node)
        }
        self.returned = _mapped(outputs[:n_outputs], values)
        values = self._copy_half(backward, saved, is_backward=True)
        gradients, of_gradients = _outputs_of(backward)
        self.gradients = _mapped(gradients, values)
        self.saved = list(dict.fromkeys(saved.values()))
        output = self.graph.output((*self.returned, *self.gradients))
        output.meta["desc"] = [*descriptions[:n_outputs], *of_gradients]
        attributes = {**_attributes(forward), **_attributes(backward)}
        self.module = fx.GraphModule(attributes, self.graph)

    def _copy_half(
        self, half: fx.GraphModule, known: dict[str, fx.Node], *, is_backward: bool
    ) -> dict[fx.Node, fx.Node]:
        values: dict[fx.Node, fx.Node] = {}
        for node in half.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder" and node.name in known:
                values[node] = known[node.name]
                continue
            copy = self.graph.node_copy(node, values.__getitem__)
            copy.meta = dict(node.meta)
            if node.op == "placeholder":
                copy.name = copy.target = node.name
                (self.tangents if is_backward else self.inputs).append(copy)
            elif is_backward:
                copy.meta["partitioner_tag"] = _BACKWARD
            elif copy.meta.get("partitioner_tag") == _BACKWARD:
                del copy.meta["partitioner_tag"]
            values[node] = copy
        return values


def _settle_storages(graph: fx.Graph) -> None:
    """Say anew what shares a storage: a view and what it is a view of, and nothing else.

    Passes over the joint graph put new nodes in, whose values on paper are their own; and what the
    backward half computes again has the very value on paper of its first computation.
    """
    seen: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            seen.update(map(_storage_id, _fakes(node.meta.get("val"))))
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta.get("val"))
        given = _fakes((args, kwargs))
        if given and _is_view_operator(node.target):
            with given[0].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
        else:
            others = seen - set(map(_storage_id, given))
            node.meta["val"] = _on_own_storages(node.meta.get("val"), others)
        seen.update(map(_storage_id, _fakes(node.meta["val"])))
        for part in node.users:
            if part.target is operator.getitem:
                part.meta["val"] = node.meta["val"][part.args[1]]


def _on_own_storages(value: Any, others: set[int]) -> Any:
    """The value, with what stands on a storage among `others` moved off it."""

    def moved(fake: FakeTensor) -> FakeTensor:
        return _apart(fake) if _storage_id(fake) in others else fake

    return pytree.tree_map_only(FakeTensor, moved, value)


def _fakes(items: Any) -> list[FakeTensor]:
    return [item for item in pytree.tree_leaves(items) if isinstance(item, FakeTensor)]


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _apart(fake: FakeTensor) -> FakeTensor:
    """Of the same shape, strides and type, on a storage of its own."""
    with fake.fake_mode:
        return torch.empty_strided(  # type: ignore[return-value]
            fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
        )


def _is_view_operator(target: Any) -> bool:
    """By its schema: the result is on the storage of an argument, and none is written."""
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(returned.alias_info is not None for returned in schema.returns)


def _outputs_of(half: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    (output,) = half.graph.find_nodes(op="output")
    values = pytree.arg_tree_leaves(*output.args)
    return values, list(output.meta.get("desc", [None] * len(values)))


def _mapped(items: Sequence[Any], values: dict[fx.Node, fx.Node]) -> list[Any]:
    return [values[item] if isinstance(item, fx.Node) else item for item in items]


def _attributes(half: fx.GraphModule) -> dict[str, Any]:
    """What the half's get_attr nodes read, by name."""
    found: dict[str, Any] = {}
    for node in half.graph.find_nodes(op="get_attr"):
        value: Any = half
        for part in str(node.target).split("."):
            value = getattr(value, part)
        found[str(node.target)] = value
    return found


def _as_capture(line: _Line, static_inputs: Collection[int]) -> Capture:
    """The line in the words of `graphs.capture.joint_graph`, for `graphs.capture.extraction`."""
    static = set(static_inputs)
    sources: dict[fx.Node, Source] = {}
    for index, node in enumerate(line.inputs):
        kind = "parameter" if index in static else "input"
        sources[node] = Source(kind, f"{kind}.{index}", index)
    for index, node in enumerate(line.tangents):
        sources[node] = Source("tangent", f"tangent.{index}", index)
    gradients = {
        placeholder: gradient
        for placeholder, gradient in zip(line.inputs, line.gradients, strict=False)
        if isinstance(gradient, fx.Node) and gradient.op != "placeholder"
    }
    return Capture(
        graph=line.graph,
        module=line.module,
        sources=sources,
        outputs=tuple(line.returned),
        output_spec=pytree.tree_flatten(())[1],
        gradient_outputs=(),
        differentiable=(),
        tangents=dict(enumerate(line.tangents)),
        gradients=gradients,
        mutations=_mutations(line),
        guards=(),
        held=(),
    )


def _mutations(line: _Line) -> dict[fx.Node, fx.Node]:
    """Inputs that the step writes, and what it writes into them.

    Either the line copies into them itself, or the new value is an output whose description names
    the input that the runtime will copy it to.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in line.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written, value = node.args[:2]
        if written in line.inputs and isinstance(value, fx.Node):
            found[written] = value
    (output,) = line.graph.find_nodes(op="output")
    described = {node.meta["desc"]: node for node in line.inputs if "desc" in node.meta}
    for value, description in zip(line.returned, output.meta["desc"], strict=False):
        target = described.get(getattr(description, "mutated_input", None))
        if target is not None and isinstance(value, fx.Node):
            found[target] = value
    return found


def _has_effect(node: fx.Node) -> bool:
    """Whether the call may not run twice: it draws random numbers, or writes into its inputs."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a higher-order operator may do anything
        return True
    return is_random(node) or bool(schema.is_mutable)
