"""Stores what is saved for backward in fewer bits.

A node after the forward operator that makes a storage packs it (`graphs.rewrites.codes`), and one
before the first backward operator that reads it unpacks it; the backward pass reads only the
unpacked one. Both are ordinary nodes: the solver decides whether the packed storage is kept,
recomputed, or copied to the host in its fewer bytes, and proves its bound for that program. Forward
operators, recomputed or not, read the original storage.

How much is packed is a choice between a few variants. Of the storages that can be packed, those
come first that have the most recomputation time per byte.

Masks packed into bits are restored exactly. All other codes change results, since they round.
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

from graphs.capture import Capture, is_backward
from graphs.costs import OpCall, flops_of
from graphs.model_calls import storage_key
from graphs.rewrites.codes import Code, Pack, Unpack

aten = torch.ops.aten

LEAST_ELEMENTS = 2**14
"""Elements of the smallest storage that is packed; packing smaller ones saves little."""


def rewrite(captured: Capture, *, code: str, share: float = 1.0) -> bool:
    """Change the captured program; returns whether there was anything to change.

    code: a name of `graphs.rewrites.codes`.
    share: which share of the bytes that can be packed is packed, at most.
    """
    kept_storages = {
        storage
        for node in (*captured.outputs, *captured.mutations.values(), *captured.gradients.values())
        for storage in _storages(node)
    }
    position = {node: n for n, node in enumerate(captured.graph.nodes)}
    packables = []
    for node in captured.graph.nodes:
        packing = None if kept_storages.intersection(_storages(node)) else _code_for(node, code)
        readers = (
            [] if packing is None else sorted(_backward_readers(node), key=position.__getitem__)
        )
        if packing is not None and readers:
            packables.append(_Packable(node, readers, packing))
    # Storages with the most FLOPs per byte first; among equals, those that wait longest. Packing
    # takes time in proportion to the bytes. So does recomputing a storage with few FLOPs per byte,
    # which is therefore better recomputed than packed.
    left_bytes = share * sum(each.n_bytes for each in packables)
    for each in sorted(packables, key=lambda each: -each.flops_per_byte):
        if each.n_bytes <= left_bytes:
            left_bytes -= each.n_bytes
            _pack(each.maker, each.readers, each.code)
    return bool(packables)


@dataclass(frozen=True)
class _Packable:
    """A storage that can be packed.

    maker: the node that makes it.
    readers: the nodes of the backward pass that read it, in order.
    code: how to pack it.
    """

    maker: fx.Node
    readers: list[fx.Node]
    code: Code

    @property
    def n_bytes(self) -> int:
        return int(self.maker.meta["val"].nbytes)

    @property
    def flops_per_byte(self) -> float:
        """FLOPs per byte of the operator that makes it. Depends only on operators and shapes."""
        source: Any = self.maker.args[0] if self.maker.target is operator.getitem else self.maker
        return flops_of(OpCall.from_node(source)) / self.n_bytes


def _code_for(node: fx.Node, name: str) -> Code | None:
    """How to pack the storage that the node makes; None: it is not packed.

    Further floating-point results of an operator after its first one are not packed: they are
    statistics (means, log-sum-exps), which are small and must be precise.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or is_backward(node) or not isinstance(value, torch.Tensor):
        return None
    if isinstance(node.target, Pack | Unpack) or value.numel() < LEAST_ELEMENTS:
        return None
    source: Any = node
    if node.target is operator.getitem:
        source = node.args[0]
        if value.dtype.is_floating_point and node.args[1] != 0:
            return None
    (storage,) = _storages(node)
    if any(storage in _storages(each) for each in source.all_input_nodes):
        return None  # a view
    n_bytes = value.untyped_storage().nbytes()
    is_whole = n_bytes == value.nbytes and value.storage_offset() == 0
    strides = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((n - 1) * step for n, step in strides)  # from its first element to its last
    if not is_whole or extent != value.numel():
        return None
    return Code.of(name, dtype=value.dtype, n_elements=value.numel())


def _pack(maker: fx.Node, readers: list[fx.Node], code: Code) -> None:
    """Pack the result of `maker`, and let these nodes of the backward pass read it unpacked."""
    graph, value = maker.graph, maker.meta["val"]
    form = (list(value.shape), list(value.stride()))
    n_rows = math.prod(value.shape) // code.width
    rows_form = ([n_rows, code.width], [code.width, 1])
    as_strided = aten.as_strided.default
    with graph.inserting_after(maker):
        rows = _new_call(maker, as_strided, (maker, *rows_form), value.as_strided(*rows_form))
    stored = tuple(value.new_empty(s, dtype=dtype) for s, dtype in code.packed(n_rows))
    with graph.inserting_after(rows):
        result = stored[0] if len(stored) == 1 else stored
        packed = _new_call(maker, Pack.of(code, n_rows), (rows,), result)
    parts = [packed]
    if len(stored) > 1:
        parts = []
        for n, each in reversed([*enumerate(stored)]):
            with graph.inserting_after(packed):
                parts.insert(0, _new_call(maker, operator.getitem, (packed, n), each))
    with graph.inserting_before(readers[0]):
        unpacked_rows = value.new_empty((n_rows, code.width))
        rows_again = _new_call(readers[0], Unpack.of(code, n_rows), tuple(parts), unpacked_rows)
        viewed = unpacked_rows.as_strided(*form)
        new = _new_call(readers[0], as_strided, (rows_again, *form), viewed)
    (storage,) = _storages(maker)
    unpacked_nodes = {maker: new}

    def unpacked(node: fx.Node) -> fx.Node:
        """What a reader reads instead of this node: the same view of the unpacked storage. Nodes on
        other storages, and those of the backward pass, stay."""
        if is_backward(node) or storage not in _storages(node):
            return node
        if node not in unpacked_nodes:  # a view
            args, kwargs = fx.map_arg((node.args, node.kwargs), unpacked)
            with graph.inserting_before(readers[0]):
                view = _new_call(readers[0], node.target, args, kwargs=kwargs)
            view.meta["val"] = _computed_value(view)
            unpacked_nodes[node] = view
        return unpacked_nodes[node]

    for reader in readers:
        reader.args = fx.map_arg(reader.args, unpacked)
        reader.kwargs = fx.map_arg(reader.kwargs, unpacked)
    affected = list(readers)
    for node in affected:  # grows in the loop
        if storage in _storages(node):  # the backward pass made a view: it moves to the new storage
            node.meta["val"] = _computed_value(node)
            affected += node.users


def _computed_value(call: fx.Node) -> Any:
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda each: each.meta["val"])
    return call.target(*args, **kwargs)  # type: ignore[operator]


def _new_call(
    like: fx.Node, target: Any, args: Any, value: Any = None, *, kwargs: Any = None
) -> fx.Node:
    """A call in the phase and the module of the node `like`; value: what it returns."""
    node = like.graph.call_function(target, args, kwargs or {})
    custom = like.meta.get("custom") or {}
    node.meta = {"custom": {k: v for k, v in custom.items() if k == "module_path"}, "val": value}
    if "partitioner_tag" in like.meta:
        node.meta["partitioner_tag"] = like.meta["partitioner_tag"]
    return node


def _backward_readers(maker: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the backward pass that read the storage, directly or through views that the
    forward pass makes."""
    (storage,) = _storages(maker)
    seen, unvisited = {maker}, [maker]
    while unvisited:
        for user in unvisited.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if is_backward(user):
                yield user
            elif storage in _storages(user):
                unvisited.append(user)


def _storages(node: Any) -> set[int]:
    """Identities of the storages of a node's values."""
    if not isinstance(node, fx.Node):
        return set()
    values = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(v) for v in values if isinstance(v, torch.Tensor)}
