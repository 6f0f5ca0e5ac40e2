"""Runs losses written with `logsumexp`, such as z-losses, in row chunks.

`logsumexp(logits) - logits.gather(...)` contains no log-softmax. `logsumexp` itself is computed in
chunks, since it takes a tensor of the logits' size while it runs. So is the gradient: the backward
pass computes softmax as `(logits - logsumexp).exp()`, and multiplies and adds a few tensors of that
size.
"""

from __future__ import annotations

import torch
from torch import fx

from graphs.capture import is_backward
from graphs.rewrites.body import Body, redirect_readers
from graphs.rewrites.chunk_sizes import is_worthwhile
from graphs.rewrites.cross_entropy import (
    Region,
    WideOperators,
    erase_unread,
    readers,
    rows_and_classes,
    without_views,
)

aten = torch.ops.aten


def rewrite_sums(graph: fx.Graph) -> bool:
    """Change the traced program; returns whether there was anything to change."""
    found = False
    sums = graph.find_nodes(op="call_function", target=aten.logsumexp.default)
    for wide in dict.fromkeys(without_views(node.args[0]) for node in sums):
        region = _operators_around(wide)
        if region is None:
            continue
        # forward: a row-chunk node for each result that takes a wide temporary (casts of the
        # logits, which each node repeats, or logsumexp's own)
        for node in region.row_results:
            if region.before or node.target is aten.logsumexp.default:
                body = Body(region)
                for each in (*region.before, node):
                    body.run(each)
                body.write_result_of(node)
                redirect_readers(node, *body.insert_before(node, like=node))
        # backward: one node, which makes the gradient of the logits and may overwrite them
        body = Body(region)
        body.read(region.logits, overwritable=region.has_gradient_dtype(region.logits))
        for node in region.before:
            body.run(node)
        body.make_gradient()
        erase_unread((*region.before, *region.row_results, *region.backward))
        found = True
    return found


def _operators_around(wide: fx.Node) -> WideOperators | None:
    """The operators around a wide tensor that `logsumexp` reads; None if they do not have the form
    that can run in chunks."""
    value = wide.meta["val"]
    if value.dim() < 2 or not is_worthwhile(*rows_and_classes(value)):
        return None
    region = Region(wide)
    if not region.is_wide(wide):
        return None
    users = readers(wide)
    row_results = tuple(each for each in users if region.is_row_result(each))
    seeds = [each for each in users if each.target is aten.sub.Tensor and is_backward(each)]
    if not seeds or not any(each.target is aten.logsumexp.default for each in row_results):
        return None
    # follow the row-wise operators of the backward pass from `logits - logsumexp` to the gradient
    last = seeds[0]
    while len(after := readers(last)) == 1:
        if not region.is_arithmetic(after[0]) and not region.is_cast_or_scaling(after[0]):
            break
        (last,) = after
    members = {last}
    region.add_argument_makers(last, members)
    backward = tuple(each for each in wide.graph.nodes if each in members)
    if seeds[0] not in members or not all(map(is_backward, backward)):
        return None
    logits, before = region.before(wide, {*row_results, *backward})
    if not logits.meta["val"].is_contiguous():
        return None
    if not all(map(region.reads_rows, (*before, *row_results, *backward))):
        return None
    if any(user.op == "output" for each in (*row_results, last) for user in each.users):
        return None  # outputs of the step are found by their node, which must stay
    return WideOperators(
        logits=logits, before=before, wide=wide, row_results=row_results, backward=backward
    )
