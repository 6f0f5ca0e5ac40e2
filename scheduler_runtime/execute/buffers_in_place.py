"""Let batch norms and counters write their buffers in place, as in eager mode.

A traced batch norm returns new running statistics, which are copied into the buffers at the end of
the forward pass. That takes two copies to make them and two to write them back: on a GPU a fifth of
a ResNet's kernels. If nothing else reads the statistics, the first run of the operator writes the
buffers itself. Recomputations do not: in training, the other results of a batch norm do not depend
on the statistics. Its backward operator takes them as arguments but does not read them either, so
it is given None. A number that is added to a buffer (`num_batches_tracked`) is added in place.

An error in the middle of a forward pass then leaves some buffers written, as in eager mode. A step
that checks values promises to leave the buffers as before, so nothing is done in place there.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture import Capture
from graphs.trace import CapturedStep

_aten = torch.ops.aten
_IN_PLACE_VARIANTS: Mapping[Any, Any] = {
    _aten._native_batch_norm_legit_functional.default: _aten._native_batch_norm_legit.default,
    _aten._batch_norm_with_update_functional.default: _aten._batch_norm_with_update.default,
}
_BACKWARD = (_aten.native_batch_norm_backward.default, _aten.batch_norm_backward.default)
_STATISTICS = slice(3, 5)
"""The running mean and variance among the arguments. The last two results are their new values."""
_TRAINING_ARGUMENT = 5
"""Index of the argument `training` of `_native_batch_norm_legit_functional`."""
_BACKWARD_TRAINING_ARGUMENT = 7
"""Index of the argument `train` of the backward operators."""


@dataclass(frozen=True)
class InPlaceOperator:
    """An operator that writes buffers in place of a traced one that returns their new values.

    target: the operator that writes.
    buffers: traced node of a new value -> placeholder of the buffer.
    """

    target: Any
    buffers: Mapping[fx.Node, fx.Node]


def buffers_in_place(step: CapturedStep) -> dict[str, InPlaceOperator]:
    """The operators that may write their buffers in place, by the name of their node."""
    captured = step.captured
    if captured.has_checks:
        return {}
    found = {}
    for node in captured.graph.nodes:
        target = _IN_PLACE_VARIANTS.get(node.target)
        if target is not None and (buffers := _writable_statistics(captured, node)) is not None:
            found[node.name] = InPlaceOperator(target, buffers)
        elif _is_counter_update(captured, node):
            found[node.name] = InPlaceOperator(_aten.add_.Tensor, {node: node.args[0]})
    return found


def _is_counter_update(captured: Capture, node: fx.Node) -> bool:
    """Whether the node adds a number to a buffer, and nothing else reads the buffer or the sum."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return False
    buffer, number = node.args
    return (
        isinstance(buffer, fx.Node)
        and isinstance(number, int | float)
        and captured.mutations.get(buffer) is node
        and node.meta["val"].dtype == buffer.meta["val"].dtype
        and _readers(buffer) == {node}
        and not _readers(node)
        and node not in _returned_nodes(captured)
    )


def _writable_statistics(captured: Capture, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """New value of a statistic -> its buffer, for a batch norm that may write them in place.

    None: it does not train, or something else reads the statistics or their new values.
    """
    if "legit" in str(node.target) and node.args[_TRAINING_ARGUMENT] is not True:
        return None
    n_results = len(node.meta["val"])
    results = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    buffers: dict[fx.Node, fx.Node] = {}
    for at, buffer in zip((n_results - 2, n_results - 1), node.args[_STATISTICS], strict=True):
        new = results.get(at)
        if new is None or not isinstance(buffer, fx.Node) or captured.mutations.get(buffer) != new:
            return None
        is_read = new in _returned_nodes(captured) or not all(
            map(_ignores_statistics, _readers(new))
        )
        if is_read or _readers(buffer) != {node}:
            return None
        buffers[new] = buffer
    return buffers


def _ignores_statistics(user: fx.Node) -> bool:
    return user.target in _BACKWARD and user.args[_BACKWARD_TRAINING_ARGUMENT] is True


def _readers(node: fx.Node) -> set[fx.Node]:
    return {user for user in node.users if user.op != "output"}


def _returned_nodes(captured: Capture) -> set[Any]:
    """The nodes that leave the step: outputs and gradients."""
    return {*captured.outputs, *captured.gradients.values()}
