"""Runs the loss's backward pass in row chunks and keeps log-softmax, so that nothing is recomputed.

The backward pass writes the gradient of the logits chunk by chunk. The gradients of log-softmax,
and of the logits before a cast, exist for only one chunk at a time. Casts and scalings before
log-softmax run in chunks together with it.
"""

from __future__ import annotations

from graphs.capture import Capture
from graphs.rewrites.body import Body, redirect_readers
from graphs.rewrites.cross_entropy import CrossEntropy, cross_entropies, erase_unread
from graphs.rewrites.log_sum_exp import rewrite_sums


def rewrite(captured: Capture) -> bool:
    """Change the captured program; returns whether there was anything to change."""
    regions = list(cross_entropies(captured.graph))
    for region in regions:
        put_in_chunks(region)
    return rewrite_sums(captured.graph) or bool(regions)


def put_in_chunks(region: CrossEntropy) -> None:
    """Change the region's graph: its backward pass runs in chunks."""
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
