"""Lets operators write their output over an input that is read for the last time.

An operator of the backward pass writes its result over an input of the same form that nothing reads
afterwards; the result becomes an alias of that input. Results stay bitwise identical, since the
same kernel runs, and it reads each position before it writes it.

What eager mode writes into a part of a tensor is traced as a scatter, which copies the tensor. It
is written in place again if the tensor is not read afterwards: in the backward pass, and in the
forward pass for scratch memory (`graphs.rewrites.scratch`).

The loss in row chunks writes the gradient of the logits over the logits, or over log-softmax, which
was written over the logits. The operators that make and read these then run only once. Little is
lost by that: the logits are last read at the beginning of the backward pass, where recomputing them
would save little.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.capture import VIEW_OF_SCATTER, Layout, OpaqueBackward, OpaqueForward, Overwrite
from graphs.graph import Node
from graphs.rewrites.row_chunks import RowChunks
from graphs.rewrites.scratch import PartWrite, scratch_memory

aten = torch.ops.aten

ELEMENTWISE = {
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
}
"""Element-wise operators that PyTorch does not tag as pointwise."""

ROW_WISE = {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
}
"""Row-wise operators that read all they need of a row (or position) before they write it: tested on
the CPU, read in the source for CUDA."""

IN_PLACE = {
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.relu.default: aten.relu_.default,
}
"""Operators whose only overload that computes in place is the in-place one -> that overload.
Arithmetic with a number has one, too, but is missing: for 16-bit tensors `mul_(x, 0.3)` first
rounds the number to 16 bits, which `mul` does not."""


def rewrite(layout: Layout) -> Layout:
    """Let nodes overwrite an input where that is safe."""
    return with_overwrites(layout, lambda node: True)


def with_overwrites(layout: Layout, may_overwrite: Callable[[Node], bool]) -> Layout:
    """Like `rewrite`, but only for some nodes.

    may_overwrite: whether a node may overwrite an input.
    """
    maker = {name: node for node in layout.nodes for name in node.outputs}
    readers: dict[str, list[str]] = {}  # storage -> the nodes that read it, in order
    read_elsewhere = set(layout.outputs)
    for node in layout.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node.name)
        call = layout.calls.get(node.name)
        if call is not None and isinstance(call.target, OpaqueForward | OpaqueBackward):
            # a module that runs as one piece may keep its tensors, in an attribute or a hook
            read_elsewhere |= {*node.inputs, *node.outputs}
    last_reader = {name: nodes[-1] for name, nodes in readers.items()}
    overwritable = {  # storages that may be overwritten: nothing outside of the step reads them
        tensor.name
        for tensor in layout.tensors
        if tensor.kind == "activation"
        and tensor.name in maker
        and tensor.name not in read_elsewhere
    }
    size_bytes = {tensor.name: tensor.size_bytes for tensor in layout.tensors}
    root: dict[str, str] = {}
    overwrites: dict[str, Overwrite] = {}
    run_once: set[str] = set()
    overwritable_forward = _overwritable_forward(layout, overwritable, last_reader)
    overwritable_forward |= scratch_memory(layout, overwritable, readers)
    nodes = []
    for node in layout.nodes:
        call = layout.calls.get(node.name)
        is_candidate = node.phase == "backward" or overwritable_forward.issuperset(node.outputs)
        if (
            call is not None
            and is_candidate
            and may_overwrite(node)
            and overwritable.issuperset(node.outputs)
        ):
            last_read_here = {
                name
                for name in overwritable.intersection(node.inputs)
                if last_reader[name] == node.name
                and (maker[name].phase == "backward" or name in overwritable_forward)
            }
            overwrite = next(_possible_overwrites(layout, call, last_read_here, size_bytes), None)
            if overwrite is not None:
                old = layout.storage[overwrite.argument]
                root[node.outputs[0]] = root.get(old, old)
                overwrites[node.name] = overwrite
                made = node.outputs[0]
                run_once |= {maker[old].name, *readers[old], *readers.get(made, ())}
                node = replace(node, overwrites=old)
        nodes.append(node)
    return replace(
        layout,
        nodes=[replace(n, recomputable=n.recomputable and n.name not in run_once) for n in nodes],
        tensors=[replace(t, alias_of=root.get(t.name)) for t in layout.tensors],
        overwriting=overwrites,
    )


def _overwritable_forward(
    layout: Layout, overwritable: set[str], last_reader: dict[str, str]
) -> set[str]:
    """The forward tensors that may be overwritten: logits and log-softmax of a loss in row chunks.

    If the gradient is written over log-softmax, log-softmax may be written over the logits.
    """
    found: set[str] = set()
    for node in reversed(layout.nodes):
        call = layout.calls.get(node.name)
        if call is None:
            continue
        read: set[str] = set()
        if isinstance(call.target, RowChunks) and overwritable.issuperset(node.outputs):
            read = {layout.storage[call.args[at]] for at in call.target.overwritable}  # type: ignore[index]
        elif call.target is aten._log_softmax.default and found.issuperset(node.outputs):
            read = set(node.inputs)
        found |= {name for name in read & overwritable if last_reader[name] == node.name}
    return found


def _possible_overwrites(
    layout: Layout, call: torch.fx.Node, last_read_here: set[str], size_bytes: dict[str, int]
) -> Iterator[Overwrite]:
    """The ways in which this call can overwrite one of the storages in `last_read_here`."""
    result = call.meta.get("val")
    overload, keyword = _writing_overload(call.target)
    if overload is None or not isinstance(result, torch.Tensor) or result.is_complex():
        return  # complex division on the CPU gives other last bits when it overwrites its input
    arguments = [
        item
        for item in pytree.tree_leaves((call.args, call.kwargs))
        if isinstance(item, torch.fx.Node) and item in layout.storage
    ]
    candidates = arguments if keyword else arguments[:1]
    if isinstance(call.target, RowChunks):
        candidates = [arguments[at] for at in call.target.overwritable]
    for argument in candidates:
        storage = layout.storage[argument]
        sharing = [item for item in arguments if layout.storage[item] == storage]
        if (
            storage in last_read_here
            and result.nbytes == size_bytes[storage]
            and all(_view_key(item.meta["val"]) == _view_key(result) for item in sharing)
        ):
            yield Overwrite(overload, argument, keyword)


def _view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that view a storage in the same way."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@functools.cache
def _writing_overload(target: Any) -> tuple[Callable[..., Any] | None, str | None]:
    """The overload of an operator that writes into a given tensor, and the name of that argument,
    which is None for an in-place overload. (None, None) if there is no such overload.

    Generated overloads do not count: they compute first and then copy, which saves nothing.
    """
    if target in IN_PLACE:
        return IN_PLACE[target], None
    if isinstance(target, RowChunks):
        return target, "out"
    if target in VIEW_OF_SCATTER:
        return PartWrite(VIEW_OF_SCATTER[target]), None
    if not isinstance(target, torch._ops.OpOverload):
        return None, None
    is_local = torch.Tag.pointwise in target.tags or target in ELEMENTWISE or target in ROW_WISE
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    if not is_local or is_random or target._schema.is_mutable:
        return None, None
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        is_native = torch.Tag.generated not in overload.tags
        if len(outs) == 1 and _read_arguments(overload) == _read_arguments(target) and is_native:
            return overload, outs[0]
    return None, None


def _read_arguments(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments that the overload reads."""
    arguments = overload._schema.arguments
    return [(item.name, str(item.type)) for item in arguments if not item.is_out]
