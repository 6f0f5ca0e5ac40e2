"""The loss in row chunks: log-softmax exists for one chunk of rows at a time, forward and backward.

The forward pass picks each row's log-probability of its target; PyTorch's own `nll_loss` of the
N x 1 column has the bits of that of the whole. The backward pass computes log-softmax again, chunk
by chunk, and writes the gradient of the logits. Where something else reads log-softmax, it stays.
"""

from __future__ import annotations

import torch

from graphs.capture import Capture
from graphs.rewrites.body import Body, put_before
from graphs.rewrites.cross_entropy import CrossEntropy, cross_entropies, erase_unread

aten = torch.ops.aten

_IGNORED = -100
"""Marks ignored rows of the column, whose only class is 0."""


def rewrite(captured: Capture) -> bool:
    """Change the captured graph; returns whether there was anything to change."""
    regions = [
        region
        for region in cross_entropies(captured.graph)
        if not region.others_read and region.target < min((region.loss, *region.row_sums))
    ]
    for region in regions:
        _pick(region)
        _gradient(region)
        erase_unread(region)
    return bool(regions)


def _pick(region: CrossEntropy) -> None:
    """nll_loss reads a column of picked values; what label smoothing reads are sums of rows."""
    _, target, _, reduction, ignored = region.loss.args
    softmax, n_rows = region.softmax.meta["val"], region.shape[0]
    place = min((region.loss, *region.row_sums))
    is_ignored = put_before(place, aten.eq.Scalar, target, ignored)
    first = put_before(place, aten.masked_fill.Scalar, target, is_ignored, 0)
    index = put_before(place, aten.unsqueeze.default, first, 1)
    marks = put_before(place, aten.where.Scalar, is_ignored, _IGNORED, 0)
    body = Body(region, n_outs=1 + len(region.row_sums))
    for node in (*region.before, region.softmax, *region.row_sums):
        body.run(node)
    picked = body.call(aten.gather.default, body.read(region.softmax), 1, body.read(index))
    body.write(picked, softmax.new_empty(n_rows, 1))
    for node in region.row_sums:
        body.write_for(node)
    column, *sums = body.nodes_before(place, like=region.loss)
    region.loss.args = (column, marks, None, reduction, _IGNORED)
    for old, new in zip(region.row_sums, sums, strict=True):
        old.replace_all_uses_with(new)


def _gradient(region: CrossEntropy) -> None:
    body = Body(region)
    body.read(region.logits, overwritable=region.has_form_of_gradient(region.logits))
    for node in (*region.before, region.softmax):
        body.run(node)
    body.replace_gradient()
