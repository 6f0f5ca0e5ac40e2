"""The loss in row chunks: log-softmax exists for one chunk of rows at a time, forward and backward.

The forward pass picks each row's log-probability of its target; PyTorch's own `nll_loss` of the
N x 1 column has the bits of that of the whole. A loss by hand gets what it gathers, and its sums
over the classes, likewise. The backward pass computes log-softmax again, chunk
by chunk, and writes the gradient of the logits. Where something else reads log-softmax, it stays.
"""

from __future__ import annotations

import torch
from torch import fx

from graphs.capture import Capture
from graphs.rewrites.body import Body, put_before, take_place
from graphs.rewrites.cross_entropy import (
    CrossEntropy,
    cross_entropies,
    erase_unread,
    without_views,
)
from graphs.rewrites.log_sum_exp import rewrite_sums

aten = torch.ops.aten

_IGNORED = -100
"""Marks ignored rows of the column, whose only class is 0."""


def rewrite(captured: Capture) -> bool:
    """Change the captured graph; returns whether there was anything to change."""
    regions = [region for region in cross_entropies(captured.graph) if _can_run_again(region)]
    for region in regions:
        put_in_chunks(region)
    return rewrite_sums(captured.graph) or bool(regions)


def put_in_chunks(region: CrossEntropy) -> None:
    """Change the graph that the region is in."""
    _results(region)
    body = Body(region)
    body.read(region.logits, overwritable=region.has_form_of_gradient(region.logits))
    for node in (*region.before, region.softmax):
        body.run(node)
    body.replace_gradient()
    erase_unread(region.own)


def _can_run_again(region: CrossEntropy) -> bool:
    """Whether the loss can do without log-softmax, and all that it reads exists where it begins."""
    results = _readers(region)
    if region.others_read or not results:
        return False
    own = {region.softmax, *region.after}
    read = {source for node in (*region.after, *results) for source in node.all_input_nodes}
    return all(source < results[0] or without_views(source) in own for source in read)


def _readers(region: CrossEntropy) -> list[fx.Node]:
    """What reads log-softmax and has no wide result."""
    return sorted([*region.row_results, *([region.loss] if region.loss else [])])


def _results(region: CrossEntropy) -> None:
    """What the loss reads of each row, in place of log-softmax."""
    place = _readers(region)[0]
    body = Body(region, n_outs=len(_readers(region)))
    index = None if region.loss is None else _picked_for(region.loss, place)
    for node in (*region.before, region.softmax, *region.after):
        body.run(node)
    if index is not None:
        picked = body.call(aten.gather.default, body.read(region.softmax), 1, body.read(index))
        body.write(picked, region.softmax.meta["val"].new_empty(region.shape[0], 1))
    for node in region.row_results:
        body.write_for(node)
    new = list(body.nodes_before(place, like=place))
    if region.loss is not None:
        region.loss.args = (new.pop(0), *region.loss.args[1:])
    for old, result in zip(region.row_results, new, strict=True):
        take_place(old, result)


def _picked_for(loss: fx.Node, place: fx.Node) -> fx.Node:
    """The classes to pick for an nll_loss, which is made one of the column of picked values."""
    values, target, _, reduction, ignored = loss.args
    is_ignored = put_before(place, aten.eq.Scalar, target, ignored)
    first = put_before(place, aten.masked_fill.Scalar, target, is_ignored, 0)
    marks = put_before(place, aten.where.Scalar, is_ignored, _IGNORED, 0)
    loss.args = (values, marks, None, reduction, _IGNORED)
    return put_before(place, aten.unsqueeze.default, first, 1)
