"""Writes into parts of a buffer, as eager mode does them.

A functional trace has `queue[:, a:b] = keys` as a copy of the whole buffer with that part replaced
(`slice_scatter`), which is copied over the buffer when the forward pass has ended. Where nothing
reads the buffer from that write on, the part is written in place where the trace has the copy: the
same bits, without the two copies of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs.capture.captured_step import Capture
from graphs.capture.traced_calls import is_backward

aten = torch.ops.aten

_VIEW_OF: dict[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""Operator that replaces a part -> the view of that part, with the same arguments."""


_IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
}
"""Operators of whose first argument the form alone matters -> what eager mode calls."""


@dataclass(frozen=True)
class View:
    """A call of an operator that views a part: `operator(tensor, *arguments)`."""

    operator: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Write:
    """A call `operator(part, *arguments)` that changes a buffer, or a part of it.

    buffer: its placeholder. arguments: fx nodes and constants. part: views of views, outermost
    first; () is the whole buffer.
    call: fx node of the same operator in the functional trace (None: it has none).
    """

    buffer: fx.Node
    arguments: tuple[Any, ...]
    part: tuple[View, ...] = ()
    operator: Callable[..., Any] = aten.copy_.default
    call: fx.Node | None = None

    @property
    def values(self) -> list[fx.Node]:
        """The arguments that are tensors."""
        return [item for item in self.arguments if isinstance(item, fx.Node)]


@dataclass
class PartWrites:
    """writes: fx node of a new value of a buffer -> the write in place that it is.

    within: fx nodes that need not run then.
    buffers: placeholders that only these writes change.
    """

    writes: dict[fx.Node, Write] = field(default_factory=dict)
    within: set[fx.Node] = field(default_factory=set)
    buffers: set[fx.Node] = field(default_factory=set)


def part_writes(captured: Capture) -> PartWrites:
    """The writes into parts of buffers that can be done in place.

    Every reader of the buffer must come before the first of them, and what one leaves there may be
    read by the next alone. So nothing reads the buffer in the backward pass; and as what reads a
    buffer that changes is not recomputed, no schedule reads it later either.
    """
    found = PartWrites()
    changed = {_storage(buffer) for buffer in captured.mutations}
    position = {node: at for at, node in enumerate(captured.graph.nodes)}
    late = (at for n, at in position.items() if n.op == "call_function" and is_backward(n))
    backward = min(late, default=len(position))
    for buffer, new_value in captured.mutations.items():
        versions: list[fx.Node] = []  # the values that it takes one after the other
        version: Any = new_value
        while version is not buffer and _replaces_part(version):
            versions.insert(0, version)
            version = version.args[0]
        if (
            version is not buffer
            or not versions
            or new_value in captured.outputs
            or position[new_value] > backward
        ):
            continue
        within: set[fx.Node] = set()
        writes = {version: _write(buffer, version, within) for version in versions}
        if (
            all(_may_write(write, changed) for write in writes.values())
            and all(position[n] <= position[versions[0]] for n in _readers(captured.graph, buffer))
            and _are_unread(versions, within)
        ):
            found.writes |= writes
            found.within |= within
            found.buffers.add(buffer)
    return found


def _replaces_part(node: fx.Node) -> bool:
    """With arguments that are the same in every step."""
    return (
        node.target in _VIEW_OF
        and not node.kwargs
        and all(isinstance(item, fx.Node) for item in node.args[:2])
        and not any(isinstance(item, fx.Node) for item in node.args[2:])
    )


def _write(buffer: fx.Node, version: fx.Node, within: set[fx.Node]) -> Write:
    """The write that this replacement of a part is; adds the nodes that need not run to within.

    A part of a part is replaced in the part, which then is replaced in the whole.
    """
    part: list[View] = []
    node, before = version, version.args[0]
    while True:
        part.append(View(_VIEW_OF[node.target], tuple(node.args[2:])))
        value = node.args[1]
        assert isinstance(value, fx.Node)
        inside = _replaces_part(value) or (value.target in _IN_PLACE and not value.kwargs)
        if not inside or [*value.users] != [node] or not _is_part(value.args[0], before, part):
            return Write(buffer, (value,), tuple(part))
        within.add(value)
        if value.target in _IN_PLACE:
            operator = _IN_PLACE[value.target]
            return Write(buffer, (value.args[1],), tuple(part), operator, value)
        node = value


def _is_part(node: Any, whole: Any, part: Sequence[View]) -> bool:
    """Whether the node is this part of the whole."""
    for view in reversed(part):
        if not isinstance(node, fx.Node) or node.target is not view.operator or node.kwargs:
            return False
        if tuple(node.args[1:]) != view.arguments:
            return False
        node = node.args[0]
    return node is whole


def _may_write(write: Write, changed: set[int]) -> bool:
    """Whether the result is what would arrive there, and of no part of a buffer that changes.

    `copy` and `fill` cast and broadcast; what is written without them has the form of the part.
    """
    if any(
        not isinstance(node.meta.get("val"), torch.Tensor) or _storage(node) in changed
        for node in write.values
    ):
        return False
    given, buffer = (write.call or write.values[0]).meta["val"], write.buffer.meta["val"]
    return bool(given.dtype == buffer.dtype and given.device == buffer.device)


def _readers(graph: fx.Graph, buffer: fx.Node) -> Iterator[fx.Node]:
    """What takes the buffer or a view of it."""
    aliases = {buffer}
    storage = _storage(buffer)
    for node in graph.nodes:
        if aliases.isdisjoint(node.all_input_nodes):
            continue
        yield node
        values = pytree.tree_leaves(node.meta.get("val"))
        tensors = (item for item in values if isinstance(item, torch.Tensor))
        if any(item.untyped_storage()._cdata == storage for item in tensors):
            aliases.add(node)


def _are_unread(versions: Sequence[fx.Node], within: set[fx.Node]) -> bool:
    """Whether each is there for the next one alone, and the last for the buffer alone."""

    def leads_to_write(user: fx.Node) -> bool:
        return user.target in _VIEW_OF.values() and all(
            reader.args[1:].count(user) == 0 if reader in within else leads_to_write(reader)
            for reader in user.users
        )

    for version, after in zip(versions, [*versions[1:], None], strict=True):
        for user in version.users:
            if user is after:
                allowed = user.args[1] is not version
            elif user.op == "output":
                allowed = after is None and pytree.tree_leaves(user.args).count(version) == 1
            else:
                allowed = leads_to_write(user)
            if not allowed:
                return False
    return True


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)
