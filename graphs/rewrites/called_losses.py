"""Runs calls of `F.cross_entropy` in row chunks, as far as a step of stock modules can.

Such a step runs the model's own code, in which only the call itself can be replaced by another
function (`scheduler_runtime.execute.called_losses`); casts and scaling around the call stay. The
programs here allocate what that function does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import dropwhile, takewhile
from typing import Any

from torch import fx

from graphs.capture import Capture, Layout, called_loss_of, overwrites_logits
from graphs.rewrites import chunked_loss, in_place
from graphs.rewrites.cross_entropy import CrossEntropy, cross_entropies, without_views
from graphs.rewrites.row_chunks import RowChunks

_DESCRIPTION = "called_loss"


def rewrite(captured: Capture) -> bool:
    """Compute log-softmax in chunks, and recompute it in the backward pass; only for calls that do
    not overwrite the logits. Returns whether there was anything to change."""
    regions = [
        each
        for each in _called_cross_entropies(captured.graph)
        if not overwrites_logits(each.softmax)
    ]
    for region in regions:
        _describe(region, keeps=False)
        chunked_loss.put_in_chunks(region)
    return bool(regions)


def rewrite_backward(captured: Capture) -> bool:
    """Keep log-softmax whole, and run only the backward pass in chunks. Returns whether there was
    anything to change."""
    regions = list(_called_cross_entropies(captured.graph))
    for region in regions:
        _describe(region, keeps=True)
        chunked_loss.put_backward_in_chunks(region)
    return bool(regions)


def _called_cross_entropies(graph: fx.Graph) -> Iterator[CrossEntropy]:
    """The cross-entropies that are one call of `F.cross_entropy`, without operators around the
    call."""
    for region in list(cross_entropies(graph)):
        number = called_loss_of(region.softmax)
        if number is None or region.loss is None or region.row_results or region.others_read:
            continue

        def is_inside(node: fx.Node, number: int = number) -> bool:
            return called_loss_of(node) == number

        before = tuple(dropwhile(lambda node: not is_inside(node), region.before))
        backward = tuple(takewhile(is_inside, region.backward))
        if len(backward) < 2:  # there must be those of the loss and of log-softmax
            continue
        first = (*before, region.softmax)[0]
        logits = without_views(first.all_input_nodes[0])
        yield replace(region, logits=logits, before=before, backward=backward)


def _describe(region: CrossEntropy, *, keeps: bool) -> None:
    """Record what the call is in the metadata of its gradient, which a row-chunk node will make."""
    gradient = region.backward[-1]
    description = {
        "call": called_loss_of(region.softmax),
        "keeps": keeps,
        "n_classes": region.shape[1],
        "dtype": str(region.logits.meta["val"].dtype).removeprefix("torch."),
        "computed_in": str(region.softmax.meta["val"].dtype).removeprefix("torch."),
        "module": region.softmax.meta["custom"].get("module_path", ""),
    }
    gradient.meta["custom"] = {**gradient.meta["custom"], _DESCRIPTION: description}


def rewrite_layout(layout: Layout) -> Layout:
    """Let the gradient overwrite log-softmax if that is kept. The logits belong to the model and
    are not overwritten."""
    keeps = {name for name, description in _descriptions(layout).items() if description["keeps"]}
    return in_place.with_overwrites(layout, lambda node: node.name in keeps)


def _descriptions(layout: Layout) -> dict[str, dict[str, Any]]:
    """Name of the node that makes the gradient -> what `_describe` recorded about the call."""
    return {
        name: description
        for name, call in layout.calls.items()
        if isinstance(call.target, RowChunks)
        if (description := call.meta.get("custom", {}).get(_DESCRIPTION)) is not None
    }


def loss_descriptions(layout: Layout) -> list[dict[str, Any]]:
    """`GraphMeta.called_losses`: what the function that replaces each call must know."""
    descriptions = _descriptions(layout)
    return [descriptions[node.name] for node in layout.nodes if node.name in descriptions]
