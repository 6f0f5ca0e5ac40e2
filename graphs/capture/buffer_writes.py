"""Writes into parts of a buffer in place, as eager mode does.

In a functional trace, `queue[:, a:b] = keys` makes a copy of the whole buffer with that part
replaced (`slice_scatter`), which is copied over the buffer at the end of the forward pass. If
nothing reads the buffer after the write, the part can be written in place at that point instead:
bitwise identical, without the two copies of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs.capture.captured_step import Capture
from graphs.capture.traced_calls import VIEW_OF_SCATTER, is_backward
from graphs.model_calls import storage_key

aten = torch.ops.aten

_IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
}
"""Operator that does not read the values of its first argument -> its in-place form."""


@dataclass(frozen=True)
class View:
    """A call of an operator that views a part: `operator(tensor, *arguments)`."""

    operator: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Write:
    """A call `operator(part, *arguments)` that changes a buffer, or a part of it.

    buffer: placeholder of the buffer.
    arguments: fx nodes and constants.
    part: views to apply to the buffer one after the other; () for the whole buffer.
    operator: the in-place operator.
    call: fx node of its functional form in the trace (None: there is no such node).
    """

    buffer: fx.Node
    arguments: tuple[Any, ...]
    part: tuple[View, ...] = ()
    operator: Callable[..., Any] = aten.copy_.default
    call: fx.Node | None = None

    @property
    def values(self) -> list[fx.Node]:
        """The arguments that are fx nodes."""
        return [item for item in self.arguments if isinstance(item, fx.Node)]


@dataclass
class PartWrites:
    """The writes into parts of buffers that can be done in place.

    writes: fx node of a new value of a buffer -> the write that replaces it.
    unneeded: fx nodes that are not needed any more.
    buffers: placeholders of the buffers, which nothing else changes.
    """

    writes: dict[fx.Node, Write] = field(default_factory=dict)
    unneeded: set[fx.Node] = field(default_factory=set)
    buffers: set[fx.Node] = field(default_factory=set)


def part_writes(captured: Capture) -> PartWrites:
    """Find the writes into parts of buffers that can be done in place.

    All readers of a buffer must come before its first write, and only the next write may read what
    a write leaves. So nothing reads the buffer in the backward pass. No schedule reads it after the
    write either, since nodes that read a changing buffer are not recomputed.
    """
    found = PartWrites()
    changed = {_storage(buffer) for buffer in captured.mutations}
    position = {node: at for at, node in enumerate(captured.graph.nodes)}
    backward_positions = (
        at for n, at in position.items() if n.op == "call_function" and is_backward(n)
    )
    backward_start = min(backward_positions, default=len(position))
    for buffer, new_value in captured.mutations.items():
        versions: list[fx.Node] = []  # the values that the buffer takes one after the other
        version: Any = new_value
        while version is not buffer and _replaces_part(version):
            versions.insert(0, version)
            version = version.args[0]
        if (
            version is not buffer
            or not versions
            or new_value in captured.outputs
            or position[new_value] > backward_start
        ):
            continue
        unneeded: set[fx.Node] = set()
        writes = {version: _in_place_write(buffer, version, unneeded) for version in versions}
        if (
            all(_may_write(write, changed) for write in writes.values())
            and all(position[n] <= position[versions[0]] for n in _readers(captured.graph, buffer))
            and _are_unread(versions, unneeded)
        ):
            found.writes |= writes
            found.unneeded |= unneeded
            found.buffers.add(buffer)
    return found


def _replaces_part(node: fx.Node) -> bool:
    """Whether the node replaces a part of a tensor, at a position that no step changes."""
    return (
        node.target in VIEW_OF_SCATTER
        and not node.kwargs
        and all(isinstance(item, fx.Node) for item in node.args[:2])
        and not any(isinstance(item, fx.Node) for item in node.args[2:])
    )


def _in_place_write(buffer: fx.Node, version: fx.Node, unneeded: set[fx.Node]) -> Write:
    """The in-place write that is equivalent to a replacement of a part.

    To write a part of a part, a trace replaces the inner part in the outer one, and that in the
    whole; the loop goes from the whole inwards.

    version: fx node of the buffer's value after the write.
    unneeded: fx nodes that are not needed any more are added here.
    """
    part: list[View] = []
    node, before = version, version.args[0]
    while True:
        part.append(View(VIEW_OF_SCATTER[node.target], tuple(node.args[2:])))
        value = node.args[1]
        assert isinstance(value, fx.Node)
        is_inner_write = _replaces_part(value) or (value.target in _IN_PLACE and not value.kwargs)
        if (
            not is_inner_write
            or [*value.users] != [node]
            or not _is_part(value.args[0], before, part)
        ):
            return Write(buffer, (value,), tuple(part))
        unneeded.add(value)
        if value.target in _IN_PLACE:
            operator = _IN_PLACE[value.target]
            return Write(buffer, (value.args[1],), tuple(part), operator, value)
        node = value


def _is_part(node: Any, base: Any, part: Sequence[View]) -> bool:
    """Whether the node is the view `part` of `base`."""
    for view in reversed(part):
        if not isinstance(node, fx.Node) or node.target is not view.operator or node.kwargs:
            return False
        if tuple(node.args[1:]) != view.arguments:
            return False
        node = node.args[0]
    return node is base


def _may_write(write: Write, changed: set[int]) -> bool:
    """Whether the write leaves the same values in place, and reads no changing buffer.

    The functional form must have the buffer's dtype and device. (`copy` and `fill` cast and
    broadcast; a value that is written without them has the shape of the part.)

    changed: storages of all buffers that the step changes.
    """
    if any(
        not isinstance(node.meta.get("val"), torch.Tensor) or _storage(node) in changed
        for node in write.values
    ):
        return False
    new_value, buffer = (write.call or write.values[0]).meta["val"], write.buffer.meta["val"]
    return bool(new_value.dtype == buffer.dtype and new_value.device == buffer.device)


def _readers(graph: fx.Graph, buffer: fx.Node) -> Iterator[fx.Node]:
    """The nodes that take the buffer or a view of it."""
    aliases = {buffer}
    storage = _storage(buffer)
    for node in graph.nodes:
        if aliases.isdisjoint(node.all_input_nodes):
            continue
        yield node
        values = pytree.tree_leaves(node.meta.get("val"))
        tensors = (item for item in values if isinstance(item, torch.Tensor))
        if any(storage_key(item) == storage for item in tensors):
            aliases.add(node)


def _are_unread(versions: Sequence[fx.Node], unneeded: set[fx.Node]) -> bool:
    """Whether nothing but the next write reads each value, and nothing but the buffer the last one.

    versions: the values that the buffer takes one after the other.
    unneeded: fx nodes that are not needed any more, whose reads do not count.
    """

    def leads_to_write(user: fx.Node) -> bool:
        return user.target in VIEW_OF_SCATTER.values() and all(
            reader.args[1:].count(user) == 0 if reader in unneeded else leads_to_write(reader)
            for reader in user.users
        )

    for version, after in zip(versions, [*versions[1:], None], strict=True):
        for user in version.users:
            if user is after:
                is_allowed = user.args[1] is not version
            elif user.op == "output":
                is_allowed = after is None and pytree.tree_leaves(user.args).count(version) == 1
            else:
                is_allowed = leads_to_write(user)
            if not is_allowed:
                return False
    return True


def _storage(node: fx.Node) -> int:
    return storage_key(node.meta["val"])
