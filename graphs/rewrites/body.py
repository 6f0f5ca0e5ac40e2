"""Builds row-chunk nodes: moves wide operators of a traced step into the body of such a node."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from graphs.rewrites.chunk_sizes import rows_per_chunk
from graphs.rewrites.cross_entropy import WideOperators, without_views
from graphs.rewrites.row_chunks import Out, RowChunks

aten = torch.ops.aten

_OVERWRITES_INPUT: dict[Any, Any] = {
    aten._log_softmax.default: aten._log_softmax.out,
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
}
"""Operators that may overwrite their first argument -> the overload that does so."""

_OUT_OVERLOADS = {**_OVERWRITES_INPUT, aten.gather.default: aten.gather.out}
"""Operators that may write directly into an output of the new node -> the overload that does so."""

_SCATTERS_INTO_ZEROS: dict[Any, Any] = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
}
"""Operators that write into zeros made for this purpose -> the overload that writes in place."""

_DIM_POSITION: dict[Any, int] = {
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten.gather.default: 1,
    aten.scatter_add.default: 1,
    aten.sum.dim_IntList: 1,
    aten.logsumexp.default: 1,
}
"""Operator -> the position of its argument `dim`, which is the dimension of the classes."""

_REDUCTIONS = {aten.sum.dim_IntList, aten.logsumexp.default}

_EXPONENTIALS = {aten.exp.default, aten.logsumexp.default}


class Body:
    """Collects operators around a wide tensor, then makes a node that runs them in chunks.

    region: the operators.
    n_outs: the number of outputs that the node will have.
    """

    def __init__(self, region: WideOperators, *, n_outs: int = 1) -> None:
        self._region = region
        self._graph = fx.Graph()
        self._destinations = [self._graph.placeholder(f"out_{n}") for n in range(n_outs)]
        self._outputs: list[torch.Tensor] = []
        self._values: dict[fx.Node, fx.Node] = {}  # node of the step -> its value in the body
        self._inputs: dict[fx.Node, bool] = {}  # node of the step -> whether it has the rows
        self._overwritable: list[fx.Node] = []

    def read(self, node: fx.Node, *, overwritable: bool = False) -> fx.Node:
        """The value in the body of a node of the step. If the body does not compute it, it becomes
        an input of the new node.

        overwritable: whether the new node's output may be written into it.
        """
        if node.meta["val"].numel() == self._region.shape.numel():
            node = without_views(node)
        if node not in self._values:
            self._values[node] = self._graph.placeholder(f"input_{len(self._inputs)}")
            self._inputs[node] = self._shape_by_rows(node.meta["val"]) is not None
        if overwritable:
            self._overwritable.append(node)
        return self._values[node]

    def run(self, node: fx.Node) -> None:
        """Add an operator of the step to the body; it will run on the rows of a chunk."""
        args: Any = self._args_in_body(node)
        kwargs: dict[str, Any] = {}
        if node.target is aten._to_copy.default:
            kwargs = {"dtype": node.meta["val"].dtype}
        target: Any = _SCATTERS_INTO_ZEROS.get(node.target, node.target)
        value = self.call(target, *args, **kwargs)
        value.meta["dtype"] = node.meta["val"].dtype
        if node.target in _OVERWRITES_INPUT and args[0].meta.get("dtype") == node.meta["val"].dtype:
            # its argument was computed in the body, so it may be overwritten
            value.target, value.kwargs = _OVERWRITES_INPUT[node.target], {"out": args[0]}
        self._values[node] = value

    def _args_in_body(self, node: fx.Node) -> tuple[Any, ...]:
        """The arguments of the operator in the body, where wide tensors are rows x classes."""
        step_args: Any = node.args
        if node.target in _SCATTERS_INTO_ZEROS:
            zeros = self.call(aten.zeros_like.default, self.read(self._region.wide))
            if node.target is aten.index_put.default:
                _, (_, classes), *rest = step_args
                return zeros, self._row_indices(classes), *fx.map_arg(rest, self.read)
            _, _, index, source = step_args
            return zeros, 1, self.read(index), self.read(source)
        if node.target is aten.index.Tensor:
            wide, (_, classes) = step_args
            return self.read(wide), self._row_indices(classes)
        args: list[Any] = list(fx.map_arg(node.args, self.read))
        if node.target in _DIM_POSITION:
            at = _DIM_POSITION[node.target]
            args[at] = 1 if isinstance(args[at], int) else [1]
        return tuple(args)

    def _row_indices(self, classes: fx.Node) -> list[fx.Node]:
        """The indices ([0, 1, ...], classes) that pick one class from each row of a chunk."""
        ones = self.call(aten.ones_like.default, self.read(classes))
        count = self.call(aten.cumsum.default, ones, 0)
        return [self.call(aten.sub.Tensor, count, 1), self.read(classes)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Call an operator in the body."""
        return self._graph.call_function(target, args, kwargs)

    def write(self, value: fx.Node, output: torch.Tensor) -> None:
        """Make this value of the body the next output of the new node.

        output: the fake tensor of the output with all rows.
        """
        destination = self._destinations[len(self._outputs)]
        self._outputs.append(output)
        target = _OUT_OVERLOADS.get(value.target, value.target)
        if (
            target in _OUT_OVERLOADS.values()
            and value.meta.get("dtype", output.dtype) == output.dtype
        ):
            value.target, value.kwargs = target, {"out": destination}
            return
        if value.target is aten._to_copy.default:  # copy_ casts by itself
            value = value.args[0]  # type: ignore[assignment]
        self._graph.call_function(aten.copy_.default, (destination, value))

    def make_gradient(self) -> None:
        """Add the operators of the backward pass, and let the new node make the gradient."""
        gradient = self._region.backward[-1]
        for node in self._region.backward:
            self.run(node)
        self.write_result_of(gradient)
        (new,) = self.insert_before(gradient, like=gradient)
        redirect_readers(gradient, new)

    def write_result_of(self, node: fx.Node) -> None:
        """Make the result of an operator of the step the next output of the new node."""
        result = node.meta["val"]
        is_per_row = node.target in _REDUCTIONS and node.args[2:3] != (True,)  # keepdim
        shape = self._region.shape[:1] if is_per_row else self._shape_by_rows(result)
        self.write(self._values[node], result.view(shape))

    def insert_before(self, place: fx.Node, *, like: fx.Node) -> tuple[fx.Node, ...]:
        """Finish the new node and insert it before `place` in the step's graph.

        like: the node whose phase and module it gets.

        Returns one node for each of its outputs.
        """
        graph, outputs = place.graph, tuple(self._outputs)
        meta = origin_meta(like)
        with graph.inserting_before(place):
            forms = [(node, self._shape_by_rows(node.meta["val"])) for node in self._inputs]
            inputs = [node if form is None else _view(node, form) for node, form in forms]
            new = graph.call_function(self._row_chunks(), tuple(inputs))
            new.meta = {**meta, "val": outputs[0] if len(outputs) == 1 else outputs}
            if len(outputs) == 1:
                return (new,)
            parts = [graph.call_function(operator.getitem, (new, n)) for n in range(len(outputs))]
        for part, value in zip(parts, outputs, strict=True):
            part.meta = {**meta, "val": value}
        return tuple(parts)

    def _row_chunks(self) -> RowChunks:
        self._graph.output(None)
        self._graph.eliminate_dead_code()  # casts that copy_ does by itself
        calls = [node for node in self._graph.nodes if node.op == "call_function"]
        inputs, body = list(self._inputs), fx.GraphModule({}, self._graph)
        return RowChunks(
            rows_per_chunk=rows_per_chunk(*self._region.shape),
            row_inputs=tuple(at for at, has_rows in enumerate(self._inputs.values()) if has_rows),
            title=", ".join(node.target._schema.name.removeprefix("aten::") for node in calls),
            outs=tuple(Out(made.shape[1:], made.dtype) for made in self._outputs),
            overwritable=tuple(inputs.index(node) for node in self._overwritable),
            has_exponentials=any(node.target in _EXPONENTIALS for node in calls),
            source=body.code,
            body=body.forward,
        )

    def _shape_by_rows(self, value: torch.Tensor) -> torch.Size | None:
        """The shape in which the tensor's first dimension is the rows; None if it has no rows."""
        n_rows, n_classes = self._region.shape
        if value.numel() == n_rows * n_classes:
            return self._region.shape
        if value.dim() > 1 and value.shape[:-1].numel() == n_rows:
            return torch.Size((n_rows, value.shape[-1]))
        return torch.Size((n_rows,)) if value.numel() == n_rows else None


def redirect_readers(old: fx.Node, new: fx.Node) -> None:
    """Let all readers of a node of the step read a new node with the same elements instead, which
    comes before the old one."""
    with old.graph.inserting_before(old):
        view = _view(new, old.meta["val"].shape)
    old.replace_all_uses_with(view)


def insert_call_before(place: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call of an operator before `place` in the step's graph, in its phase and module."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)
    # In the fake mode of the values: `where.Scalar` creates tensors from scalars on their device,
    # which may be a card that this machine does not have.
    values = fx.map_arg(args, lambda argument: argument.meta["val"])
    with torch._guards.detect_fake_mode(values) or nullcontext():
        value = target(*values)
    node.meta = {**origin_meta(place), "val": value}
    return node


def origin_meta(node: fx.Node) -> dict[str, Any]:
    """The node's fx metadata that says its phase, module and autograd function."""
    kept = ("partitioner_tag", "custom", "seq_nr")
    return {key: node.meta[key] for key in kept if key in node.meta}


def _view(node: fx.Node, shape: torch.Size) -> fx.Node:
    """A view of the node in this shape; the node itself if it has the shape."""
    value = node.meta["val"]
    if value.shape == shape:
        return node
    view = node.graph.call_function(aten.view.default, (node, list(shape)))
    view.meta = {**node.meta, "val": value.view(shape)}
    return view
