"""Storages that wait for the backward pass in fewer bits.

After the forward operator that makes a storage a node packs it (`graphs.rewrites.codes`), and
before the first backward operator that reads it another one unpacks it. Whatever the backward pass
reads of the storage it reads from there. Both are nodes like others: the packed storage is kept,
recomputed, or copied to the host in its fewer bytes, as the solver decides, and the bound is proven
for that program. Operators of the forward pass, also those that are recomputed, read the storage
itself.

How much of it is packed is a choice among a few programs: of the storages that could be, those
come first whose recomputation would take longest for their bytes.

Masks in bits come back with every bit. The other codes change results: what waits is rounded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs.capture import Capture
from graphs.costs import OpCall, flops_of
from graphs.rewrites.codes import Code, Pack, Unpack

aten = torch.ops.aten

LEAST_NUMBERS = 2**14
"""Of a storage: packing a smaller one saves little."""


def rewrite(captured: Capture, *, code: str, share: float = 1.0) -> bool:
    """Change the captured graph; returns whether there was anything to change.

    code: a name of `graphs.rewrites.codes`.
    share: of the bytes that may wait packed, those that do at most, the most rewarding first.
    """
    held = {
        storage
        for node in (*captured.outputs, *captured.mutations.values(), *captured.gradients.values())
        for storage in _storages(node)
    }
    position = {node: n for n, node in enumerate(captured.graph.nodes)}
    found = []
    for node in captured.graph.nodes:
        how = None if held.intersection(_storages(node)) else _code_for(node, code)
        readers = [] if how is None else sorted(_late_readers(node), key=position.__getitem__)
        if how is not None and readers:
            found.append(_Waiting(node, readers, how))
    # First those whose recomputation would take longest for their bytes, the longest waiting first
    # among equals. Packing takes time by bytes. So does making again what has few operations for
    # its bytes, which is therefore worth no packing; what takes many operations is.
    left_bytes = share * sum(each.n_bytes for each in found)
    for each in sorted(found, key=lambda each: -each.flops_per_byte):
        if each.n_bytes <= left_bytes:
            left_bytes -= each.n_bytes
            _wait_packed(each.made, each.readers, each.code)
    return bool(found)


@dataclass(frozen=True)
class _Waiting:
    """A storage that may wait packed. readers: of the backward pass, the first first."""

    made: fx.Node
    readers: list[fx.Node]
    code: Code

    @property
    def n_bytes(self) -> int:
        return int(self.made.meta["val"].nbytes)

    @property
    def flops_per_byte(self) -> float:
        """Of the operator that makes it; by operators and shapes alone."""
        source: Any = self.made.args[0] if self.made.target is operator.getitem else self.made
        return flops_of(OpCall.from_node(source)) / self.n_bytes


def _code_for(node: fx.Node, name: str) -> Code | None:
    """How the storage that the node makes is packed; None: it stays as it is.

    What an operator returns beside its first result, in floating point, is statistics of it (means,
    log-sum-exps), which are small and must be precise.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or _is_late(node) or not isinstance(value, torch.Tensor):
        return None
    if isinstance(node.target, Pack | Unpack) or value.numel() < LEAST_NUMBERS:
        return None
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    if node.target is operator.getitem:
        source: Any = node.args[0]
        arguments = pytree.tree_leaves((source.args, source.kwargs))
        if value.dtype.is_floating_point and node.args[1] != 0:
            return None
    nodes = [each for each in arguments if isinstance(each, fx.Node)]
    (storage,) = _storages(node) or (None,)
    if any(storage in _storages(each) for each in nodes):
        return None  # a view
    n_bytes = value.untyped_storage().nbytes()
    is_whole = n_bytes == value.numel() * value.element_size() and value.storage_offset() == 0
    steps = zip(value.shape, value.stride(), strict=True)
    n_apart = 1 + sum((n - 1) * step for n, step in steps)  # from its first number to its last
    if not is_whole or n_apart != value.numel():
        return None
    return Code.of(name, dtype=value.dtype, n_numbers=value.numel())


def _wait_packed(made: fx.Node, readers: list[fx.Node], code: Code) -> None:
    """Pack what `made` has made, and let these nodes of the backward pass read it unpacked."""
    graph, value = made.graph, made.meta["val"]
    form = (list(value.shape), list(value.stride()))
    n_rows = math.prod(value.shape) // code.width
    with graph.inserting_after(made):
        rows = _call(made, aten.as_strided.default, (made, [n_rows, code.width], [code.width, 1]))
        rows.meta["val"] = value.as_strided((n_rows, code.width), (code.width, 1))
    stored = tuple(value.new_empty(s, dtype=dtype) for s, dtype in code.packed(n_rows))
    with graph.inserting_after(rows):
        packed = _call(made, Pack.of(code, n_rows), (rows,))
        packed.meta["val"] = stored[0] if len(stored) == 1 else stored
    parts = [packed]
    if len(stored) > 1:
        parts = []
        for n, each in reversed([*enumerate(stored)]):
            with graph.inserting_after(packed):
                parts.insert(0, _call(made, operator.getitem, (packed, n)))
            parts[0].meta["val"] = each
    with graph.inserting_before(readers[0]):
        back = _call(readers[0], Unpack.of(code, n_rows), tuple(parts))
        back.meta["val"] = value.new_empty((n_rows, code.width))
        new = _call(readers[0], aten.as_strided.default, (back, *form))
        new.meta["val"] = back.meta["val"].as_strided(*form)
    (storage,) = _storages(made)
    copies = {made: new}

    def unpacked(node: fx.Node) -> fx.Node:
        """The node of the backward pass that has the value of this one."""
        if _is_late(node) or storage not in _storages(node):
            return node
        if node not in copies:  # a view
            args, kwargs = fx.map_arg((node.args, node.kwargs), unpacked)
            with graph.inserting_before(readers[0]):
                copies[node] = _call(readers[0], node.target, args, kwargs)
            copies[node].meta["val"] = _value(copies[node])
        return copies[node]

    for reader in readers:
        reader.args = fx.map_arg(reader.args, unpacked)
        reader.kwargs = fx.map_arg(reader.kwargs, unpacked)
    waiting = list(readers)
    for node in waiting:  # it grows
        if storage in _storages(node):  # a view that the backward pass makes
            node.meta["val"] = _value(node)
            waiting += node.users


def _value(call: fx.Node) -> Any:
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda each: each.meta["val"])
    return call.target(*args, **kwargs)  # type: ignore[operator]


def _call(like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """A call in the phase and the module of another node."""
    node = like.graph.call_function(target, args, kwargs or {})
    custom = like.meta.get("custom") or {}
    node.meta = {"custom": {k: v for k, v in custom.items() if k == "module_path"}}
    if "partitioner_tag" in like.meta:
        node.meta["partitioner_tag"] = like.meta["partitioner_tag"]
    return node


def _late_readers(made: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the backward pass that read the storage, by way of the forward pass's views."""
    (storage,) = _storages(made)
    seen, waiting = {made}, [made]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if _is_late(user):
                yield user
            elif storage in _storages(user):
                waiting.append(user)


def _storages(node: Any) -> set[int]:
    """Addresses of the storages of its values."""
    if not isinstance(node, fx.Node):
        return set()
    values = pytree.tree_leaves(node.meta.get("val"))
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}


def _is_late(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"
