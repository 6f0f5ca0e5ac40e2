"""Runs the loss in row chunks: log-softmax exists for only one chunk of rows at a time, in the
forward and in the backward pass.

The forward pass picks the log-probability of each row's target; PyTorch's own `nll_loss` on this
N x 1 column is bitwise identical to that on the whole log-softmax. For hand-written losses, what
they gather and their sums over the classes are computed in chunks likewise. The backward pass
recomputes log-softmax chunk by chunk, and writes the gradient of the logits. A loss stays unchanged
if anything else reads its log-softmax.

`rewrite_backward` runs only the backward pass in chunks and keeps log-softmax, so that nothing is
recomputed. The gradients of log-softmax, and of the logits before a cast, exist for only one chunk
at a time. Casts and scalings before log-softmax run in chunks together with it.
"""

from __future__ import annotations

import torch
from torch import fx

from graphs.capture import Capture
from graphs.rewrites.body import Body, insert_call_before, redirect_readers
from graphs.rewrites.cross_entropy import (
    CrossEntropy,
    cross_entropies,
    erase_unread,
    without_views,
)
from graphs.rewrites.log_sum_exp import rewrite_sums

aten = torch.ops.aten

_IGNORED = -100
"""The target of ignored rows in the loss of the column, where all other rows have target 0."""


def rewrite(captured: Capture) -> bool:
    """Change the captured program; returns whether there was anything to change."""
    regions = [
        region for region in cross_entropies(captured.graph) if _can_drop_log_softmax(region)
    ]
    for region in regions:
        put_in_chunks(region)
    return rewrite_sums(captured.graph) or bool(regions)


def rewrite_backward(captured: Capture) -> bool:
    """The same, with only the backward pass in chunks."""
    regions = list(cross_entropies(captured.graph))
    for region in regions:
        put_backward_in_chunks(region)
    return rewrite_sums(captured.graph) or bool(regions)


def put_in_chunks(region: CrossEntropy) -> None:
    """Change the region's graph: the loss runs in chunks, forward and backward."""
    _insert_forward_node(region)
    body = Body(region)
    body.read(region.logits, overwritable=region.has_gradient_dtype(region.logits))
    for node in (*region.before, region.softmax):
        body.run(node)
    body.make_gradient()
    erase_unread(region.replaced)


def put_backward_in_chunks(region: CrossEntropy) -> None:
    """Change the region's graph: only its backward pass runs in chunks."""
    body = Body(region)
    body.read(region.softmax, overwritable=region.has_gradient_dtype(region.softmax))
    body.make_gradient()
    if region.before:
        body = Body(region)
        for node in (*region.before, region.softmax):
            body.run(node)
        body.write_result_of(region.softmax)
        redirect_readers(region.softmax, *body.insert_before(region.softmax, like=region.softmax))
    erase_unread(region.replaced)


def _can_drop_log_softmax(region: CrossEntropy) -> bool:
    """Whether nothing else needs log-softmax, and all that the loss reads besides exists before its
    first operator."""
    results = _log_softmax_readers(region)
    if region.others_read or not results:
        return False
    recomputed = {region.softmax, *region.after}
    read = {source for node in (*region.after, *results) for source in node.all_input_nodes}
    return all(source < results[0] or without_views(source) in recomputed for source in read)


def _log_softmax_readers(region: CrossEntropy) -> list[fx.Node]:
    """The operators that read log-softmax and have no wide result, in order."""
    return sorted([*region.row_results, *([region.loss] if region.loss else [])])


def _insert_forward_node(region: CrossEntropy) -> None:
    """Insert the forward node: it computes what the loss reads of each row of log-softmax."""
    place = _log_softmax_readers(region)[0]
    body = Body(region, n_outs=len(_log_softmax_readers(region)))
    classes = None if region.loss is None else _picked_classes(region.loss, place)
    for node in (*region.before, region.softmax, *region.after):
        body.run(node)
    if classes is not None:
        picked = body.call(aten.gather.default, body.read(region.softmax), 1, body.read(classes))
        body.write(picked, region.softmax.meta["val"].new_empty(region.shape[0], 1))
    for node in region.row_results:
        body.write_result_of(node)
    new = list(body.insert_before(place, like=place))
    if region.loss is not None:
        region.loss.args = (new.pop(0), *region.loss.args[1:])
    for old, result in zip(region.row_results, new, strict=True):
        redirect_readers(old, result)


def _picked_classes(loss: fx.Node, place: fx.Node) -> fx.Node:
    """The class to pick from each row for an nll_loss. Changes the nll_loss's arguments so that it
    can read the column of picked values instead of log-softmax."""
    values, target, _, reduction, ignored = loss.args
    is_ignored = insert_call_before(place, aten.eq.Scalar, target, ignored)
    classes = insert_call_before(place, aten.masked_fill.Scalar, target, is_ignored, 0)
    column_target = insert_call_before(place, aten.where.Scalar, is_ignored, _IGNORED, 0)
    loss.args = (values, column_target, None, reduction, _IGNORED)
    return insert_call_before(place, aten.unsqueeze.default, classes, 1)
