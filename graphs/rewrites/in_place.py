"""Outputs into dying inputs: a gradient that is read for the last time makes room for the next.

An operator of the backward pass writes its result over an input of the same form that nothing reads
afterwards, and the result is an alias of that input. Every bit stays: the operator is the same
kernel, which reads each position before it writes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.capture import Capture, Layout, Overwrite

aten = torch.ops.aten

ELEMENTWISE = {
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
}
"""These are not tagged as such."""

ROW_WISE = {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
}
"""They read what they need of a row, or of a position, before they write it: on the CPU as tested,
on CUDA by their source."""

IN_PLACE = {
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.relu.default: aten.relu_.default,
}
"""These have only an in-place overload that computes directly. Arithmetic with a number has one
too, but `mul_(x, 0.3)` rounds the number to 16 bits first, where `mul` does not."""


def rewrite(_captured: Capture, layout: Layout, _cost: Callable[[Any], Any]) -> Layout:
    """Let nodes of the backward pass overwrite an input where that is safe."""
    made = {name: node for node in layout.nodes for name in node.outputs}
    last = {name: node.name for node in layout.nodes for name in node.inputs}
    free = {  # may take part: nobody outside of the step sees them
        tensor.name
        for tensor in layout.tensors
        if tensor.kind == "activation" and tensor.name in made and tensor.name not in layout.outputs
    }
    size_bytes = {tensor.name: tensor.size_bytes for tensor in layout.tensors}
    root: dict[str, str] = {}
    overwriting: dict[str, Overwrite] = {}
    nodes = []
    for node in layout.nodes:
        call = layout.calls.get(node.name)
        if call is not None and node.phase == "backward" and free.issuperset(node.outputs):
            dying = {
                name
                for name in free.intersection(node.inputs)
                if made[name].phase == "backward" and last[name] == node.name
            }
            found = next(_overwrites(layout, call, dying, size_bytes), None)
            if found is not None:
                old = layout.storage[found.argument]
                root[node.outputs[0]] = root.get(old, old)
                overwriting[node.name] = found
                node = dataclasses.replace(node, overwrites=old)
        nodes.append(node)
    return dataclasses.replace(
        layout,
        nodes=nodes,
        tensors=[dataclasses.replace(t, alias_of=root.get(t.name)) for t in layout.tensors],
        overwriting=overwriting,
    )


def _overwrites(
    layout: Layout, call: torch.fx.Node, dying: set[str], size_bytes: dict[str, int]
) -> Iterator[Overwrite]:
    """The ways in which this call can overwrite one of these storages."""
    made = call.meta.get("val")
    overload, keyword = _overload(call.target)
    if overload is None or not isinstance(made, torch.Tensor):
        return
    arguments = [
        item
        for item in pytree.tree_leaves((call.args, call.kwargs))
        if isinstance(item, torch.fx.Node) and item in layout.storage
    ]
    for argument in arguments if keyword else arguments[:1]:
        storage = layout.storage[argument]
        sharing = [item for item in arguments if layout.storage[item] == storage]
        if (
            storage in dying
            and made.numel() * made.element_size() == size_bytes[storage]
            and all(_form(item.meta["val"]) == _form(made) for item in sharing)
        ):
            yield Overwrite(overload, argument, keyword)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same positions of a storage as the same numbers."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@functools.cache
def _overload(target: Any) -> tuple[torch._ops.OpOverload | None, str | None]:
    """The overload that writes into a tensor that it is given, and the name of that argument.

    A generated one computes first and copies then, which saves nothing. The name is None for an
    in-place overload.
    """
    if target in IN_PLACE:
        return IN_PLACE[target], None
    if not isinstance(target, torch._ops.OpOverload) or not _is_safe(target):
        return None, None
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        is_native = torch.Tag.generated not in overload.tags
        if len(outs) == 1 and _takes(overload) == _takes(target) and is_native:
            return overload, outs[0]
    return None, None


def _is_safe(target: torch._ops.OpOverload) -> bool:
    elementwise = torch.Tag.pointwise in target.tags or target in ELEMENTWISE
    random = torch.Tag.nondeterministic_seeded in target.tags
    mutable = target._schema.is_mutable
    return (elementwise or target in ROW_WISE) and not random and not mutable


def _takes(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of what it reads."""
    arguments = overload._schema.arguments
    return [(item.name, str(item.type)) for item in arguments if not item.is_out]
