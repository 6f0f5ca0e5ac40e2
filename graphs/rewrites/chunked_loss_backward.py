"""The loss in row chunks, log-softmax kept: no time is lost to compute it again.

The backward pass writes the gradient of the logits chunk by chunk; gradients of log-softmax, and of
the logits before a cast, exist for one chunk at a time. Casts before log-softmax join it, likewise.
"""

from __future__ import annotations

from graphs.capture import Capture
from graphs.rewrites.body import Body, take_place
from graphs.rewrites.cross_entropy import CrossEntropy, cross_entropies, erase_unread
from graphs.rewrites.log_sum_exp import rewrite_sums


def rewrite(captured: Capture) -> bool:
    """Change the captured graph; returns whether there was anything to change."""
    regions = list(cross_entropies(captured.graph))
    for region in regions:
        put_in_chunks(region)
    return rewrite_sums(captured.graph) or bool(regions)


def put_in_chunks(region: CrossEntropy) -> None:
    """Change the graph that the region is in."""
    body = Body(region)
    body.read(region.softmax, overwritable=region.has_form_of_gradient(region.softmax))
    body.replace_gradient()
    if region.before:
        body = Body(region)
        for node in (*region.before, region.softmax):
            body.run(node)
        body.write_for(region.softmax)
        take_place(region.softmax, *body.nodes_before(region.softmax, like=region.softmax))
    erase_unread(region.own)
