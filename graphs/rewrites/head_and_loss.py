"""Runs the head's matrix product and its cross-entropy in row chunks, so that the logits never
exist as a whole. Changes last bits.

The forward pass computes the loss and, chunk by chunk, the gradients of the rows, of the head's
weight and of its bias, all for a gradient of 1 of the summed loss (`HeadLoop`); the backward pass
scales them. So the head's product is computed once, as in the plain step, and no tensor of N x V
elements outlives a chunk. (Wijmans et al. 2024, "Cut Your Losses", and Liger Kernel, Hsu et al.
2024, also compute gradients in the forward pass.)

This applies to cross-entropies, reduced to a mean or a sum, whose logits are an `mm` or `addmm`
that nothing else reads. Not in float16: there the loss scale keeps gradients from overflowing or
vanishing, and it is not known in the forward pass.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture import Capture
from graphs.rewrites.body import insert_call_before, origin_meta
from graphs.rewrites.chunk_sizes import rows_for_n_chunks, rows_per_chunk
from graphs.rewrites.cross_entropy import CrossEntropy, cross_entropies, readers, without_views
from graphs.rewrites.head_loop import MEAN, PRODUCTS_PER_SUM, SUM, HeadLoop, Step
from graphs.rewrites.row_chunks import Out, RowChunks

aten = torch.ops.aten

_TRANSPOSED = {aten.t.default, aten.numpy_T.default}


def rewrite(captured: Capture, *, n_chunks: int) -> bool:
    """Change the captured program; returns whether there was anything to change.

    Losses with too few rows for `n_chunks` chunks are not changed.
    """
    found = False
    for region in list(cross_entropies(captured.graph)):
        chunk_rows, head = rows_for_n_chunks(n_chunks, region.shape[0]), _head_of(region)
        if chunk_rows is not None and head is not None:
            _replace_with_loop(region, head, chunk_rows)
            found = True
    return found


@dataclass(frozen=True)
class _Head:
    """The head: the product that makes the logits, and the nodes that make its gradients.

    product: the `mm` or `addmm`.
    rows, weight, bias: its arguments.
    loss: the node of the loss.
    gradients: name of a gradient, as in `HeadLoop.makes` -> the node that makes it.
    """

    product: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    loss: fx.Node
    gradients: dict[str, fx.Node]


def _head_of(region: CrossEntropy) -> _Head | None:
    """The head that makes the logits of this cross-entropy; None if the operators around it do not
    have the form that `HeadLoop` can replace."""
    loss = region.loss
    if loss is None or len(region.backward) < 2:
        return None
    nll, softmax, *_ = region.backward
    is_simple = (
        nll.target is aten.nll_loss_backward.default
        and softmax.target is aten._log_softmax_backward_data.default
        and loss.args[3] in (MEAN, SUM)
        and not region.others_read
        and not region.after
    )
    product = without_views(region.logits)
    first = (*region.before, region.softmax)[0]
    if not is_simple or readers(product) != [first] or product.kwargs:
        return None
    if product.meta["val"].dtype == torch.float16:
        return None
    arguments: Any = product.args
    if product.target is aten.mm.default:
        (rows, weight), bias = arguments, None
    elif product.target is aten.addmm.default and arguments[0].meta["val"].dim() == 1:
        bias, rows, weight = arguments
    else:
        return None
    # every reader of the product's gradient must be a gradient that the loop can make
    gradients: dict[str, fx.Node] = {}
    for reader in _readers_through_transposes(region.backward[-1]):
        name = _gradient_name(reader, region.backward[-1], rows, weight)
        if name is None or name in gradients:
            return None
        gradients[name] = reader
    if any(not node.meta["val"].is_contiguous() for node in gradients.values()):
        return None
    return _Head(product, rows, weight, bias, loss, gradients)


def _readers_through_transposes(node: fx.Node) -> list[fx.Node]:
    """The operators that read a node, directly or through views and transposes."""
    found: list[fx.Node] = []
    for user in readers(node):
        found += _readers_through_transposes(user) if user.target in _TRANSPOSED else [user]
    return found


def _gradient_name(
    reader: fx.Node, d_product: fx.Node, rows: fx.Node, weight: fx.Node
) -> str | None:
    """Which gradient (a name in `HeadLoop.makes`) an operator computes from the gradient of the
    product; None: none of these."""
    if reader.target is aten.sum.dim_IntList:
        sums_rows = reader.args[1:] == ([0], True)
        return "bias" if sums_rows and _source_of(reader.args[0]) == (d_product, 0) else None
    if reader.target is not aten.mm.default:
        return None
    (rows_source, rows_t), (weight_source, weight_t) = _source_of(rows), _source_of(weight)
    names = {
        ((d_product, 0), (weight_source, 1 - weight_t)): "rows",
        ((d_product, 1), (rows_source, rows_t)): "weight.t",
        ((rows_source, 1 - rows_t), (d_product, 0)): "weight",
    }
    one, other = map(_source_of, reader.args)
    return names.get((one, other))


def _source_of(node: Any) -> tuple[fx.Node, int]:
    """The node that this node is a view of, and 1 if it is transposed, else 0."""
    transposed = 0
    while True:
        node = without_views(node)
        if node.target not in _TRANSPOSED:
            return node, transposed
        node, transposed = node.args[0], 1 - transposed


def _replace_with_loop(region: CrossEntropy, head: _Head, chunk_rows: int) -> None:
    """Turn the loss's node into the loop, and the nodes that made gradients into ones that scale
    the loop's gradients."""
    loss, d_loss = head.loss, region.backward[0].args[0]
    loss_value, *weight_sums = loss.users  # getitems of the loss and of the sum of weights
    _, target, _, reduction, ignored = loss.args
    is_16_bit = head.rows.meta["val"].dtype.itemsize < 4
    operators = (head.product, *region.before, region.softmax, loss, *region.backward)
    title = ", ".join(n.target._schema.name.removeprefix("aten::") for n in operators)  # type: ignore[union-attr]
    loop = HeadLoop(
        rows_per_product=chunk_rows,
        rows_per_chunk=chunk_rows * (PRODUCTS_PER_SUM if is_16_bit else 1),
        row_inputs=(0, 1),
        title=f"{title} -> {', '.join(head.gradients)}",
        reduction=reduction,  # type: ignore[arg-type]
        ignored=ignored,  # type: ignore[arg-type]
        dtype=loss_value.meta["val"].dtype,
        makes=tuple(head.gradients),
        before=(*map(_as_step, region.before), _as_step(region.softmax, is_cast=True)),
        after=(_as_step(region.backward[1], is_cast=True), *map(_as_step, region.backward[2:])),
    )
    bias = [] if head.bias is None else [head.bias]
    loss.target, loss.args = loop, (head.rows, target, head.weight, *bias)
    _, *values = loop(*(node.meta["val"] for node in loss.args))  # type: ignore[union-attr]
    loss.meta["val"] = (loss_value.meta["val"], *values)
    with loss.graph.inserting_after(loss_value):
        parts = [  # in reverse order, since each is inserted right after the loss
            loss.graph.call_function(operator.getitem, (loss, at))
            for at in range(len(values), 0, -1)
        ][::-1]
    for part, value in zip(parts, values, strict=True):
        part.meta = {**origin_meta(loss), "val": value}
    divisor, *gradients = parts
    scale = insert_call_before(min(head.gradients.values()), aten.div.Tensor, d_loss, divisor)
    for old, new in zip(head.gradients.values(), gradients, strict=True):
        _make_scaling(_with_float32_cast(old), new, scale)
    replaced = {head.product, *region.before, region.softmax, *weight_sums, *region.backward}
    for node in reversed(list(loss.graph.nodes)):
        if not node.users and _source_of(node)[0] in replaced | set(head.gradients.values()):
            node.graph.erase_node(node)


def _with_float32_cast(gradient: fx.Node) -> fx.Node:
    """The cast to float32 of a 16-bit gradient, if nothing else reads that (autocast); else the
    gradient itself.

    The loop's sums over chunks are float32 already, so the cast can be replaced, too.
    """
    node, n_transposed = gradient, 0
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten._to_copy.default and node.meta["val"].dtype == torch.float32:
            has_same_strides = node.meta["val"].stride() == gradient.meta["val"].stride()
            return node if n_transposed % 2 == 0 and has_same_strides else gradient
        if node.target not in _TRANSPOSED:
            break
        n_transposed += 1
    return gradient


def _make_scaling(node: fx.Node, gradient: fx.Node, scale: fx.Node) -> None:
    """Turn a node of the backward pass into the product of a gradient and a scale (1 element).

    It multiplies in float32 and in chunks; `mul` would round the scale to 16 bits.
    """
    n_rows, *row = node.meta["val"].shape
    dtype = node.meta["val"].dtype
    is_same_dtype = gradient.meta["val"].dtype == dtype == scale.meta["val"].dtype
    node.target = RowChunks(
        rows_per_chunk=n_rows if is_same_dtype else rows_per_chunk(n_rows, math.prod(row)),
        row_inputs=(0,),
        title="mul",
        outs=(Out(tuple(row), dtype),),
        overwritable=(0,) if gradient.meta["val"].dtype == dtype else (),
        source="mul",
        body=_multiply_into,
    )
    node.args, node.kwargs = (gradient, scale), {}


def _multiply_into(out: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor) -> None:
    torch.mul(gradient, scale, out=out)


def _as_step(node: fx.Node, *, is_cast: bool = False) -> Step:
    """A function that does what the node does: scales by a number, or casts to its dtype.

    is_cast: take only the cast to the node's dtype.
    """
    target, numbers, dtype = node.target, node.args[1:], node.meta["val"].dtype
    if is_cast or target is aten._to_copy.default:
        return lambda tensor: tensor.to(dtype)
    return lambda tensor: target(tensor, *numbers)  # type: ignore[operator]
