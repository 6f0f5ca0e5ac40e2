"""Scratch memory of the forward pass: filled part by part, read, and not needed in backward.

A loss that computes the logits in chunks writes each chunk into the same tensor. In a trace each
write is a scatter, which copies the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.capture import VIEW_OF_SCATTER, Capture, Layout
from graphs.model_calls import storage_key


@dataclass(frozen=True)
class PartWrite:
    """Writes over a part of a tensor, and returns the tensor: a scatter in place.

    view: the operator that views the part.
    """

    __name__ = "write_part"
    view: Callable[..., Any]

    def __call__(self, whole: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.view(whole, *args, **kwargs).copy_(part)
        return whole


def with_direct_writes(captured: Capture) -> Capture:
    """Let scatters read what a `copy_` into the part has read; drop copies of a part into itself.

    `part.copy_(value)` is traced as a copy with the form of the part, then the scatter. `whole[a:b]
    += value` also writes the part, which is up to date, into itself. Returns a new program, or the
    same object if nothing changes.
    """
    if not any(node.target in VIEW_OF_SCATTER for node in captured.graph.nodes):
        return captured
    changed, is_changed = captured.copy(), False
    gradients, mutations = dict(changed.gradients), dict(changed.mutations)
    for node in [node for node in changed.graph.nodes if node.target in VIEW_OF_SCATTER]:
        whole, value, *part = node.args
        if value.target is torch.ops.aten.copy.default and _have_same_form(value, value.args[1]):
            copied, value = value, value.args[1]
            node.args = (whole, value, *part)
            if not copied.users:
                changed.graph.erase_node(copied)
            is_changed = True
        is_part = value.target is VIEW_OF_SCATTER[node.target] and value.kwargs == node.kwargs
        is_part = is_part and value.args == (whole, *part) and _have_same_layout(node, whole)
        if is_part and node not in changed.outputs:
            _replace(node, whole)
            for results in (gradients, mutations):
                results.update({key: whole for key, each in results.items() if each is node})
            changed.graph.erase_node(node)
            is_changed = True
    if not is_changed:
        return captured
    return replace(changed, gradients=gradients, mutations=mutations)


def _have_same_form(one: torch.fx.Node, other: Any) -> bool:
    """Whether the values of two nodes have the same shape, dtype and device."""
    value = other.meta.get("val")  # a constant has none
    if not isinstance(value, torch.Tensor):
        return False
    form, wanted = ((v.shape, v.dtype, v.device) for v in (value, one.meta["val"]))
    return form == wanted


def _have_same_layout(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether the values of two nodes of the same form lie in their storages in the same way."""
    a, b = (each.meta["val"] for each in (one, other))
    sizes = a.untyped_storage().nbytes(), b.untyped_storage().nbytes()
    is_same = a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return bool(is_same and sizes[0] == sizes[1])


def _replace(old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Replace all uses of a node; views of its value become views of the new one's storage."""
    key, users = storage_key(old.meta["val"]), list(old.users)
    old.replace_all_uses_with(new)
    while users:
        user = users.pop()
        values = pytree.tree_leaves(user.meta.get("val"))
        if any(isinstance(item, torch.Tensor) and storage_key(item) == key for item in values):
            args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
            user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
            users += user.users


def scratch_memory(
    layout: Layout, overwritable: Set[str], readers: Mapping[str, Sequence[str]]
) -> set[str]:
    """The forward tensors that scatters should write into instead of copying them, and the results.

    What is written in place is computed once. So a tensor counts as scratch memory only if what the
    backward pass reads, of all that is computed from it, is smaller than the tensor.

    overwritable: the storages that nothing outside of the step reads.
    readers: storage -> the nodes that read it, in order.
    """
    found: set[str] = set()
    size_bytes = {tensor.name: tensor.size_bytes for tensor in layout.tensors}
    for versions in _versions(layout, readers):
        if overwritable >= set(versions):
            kept = _read_in_backward(layout, versions)
            if sum(size_bytes[name] for name in kept) < size_bytes[versions[0]]:
                found.update(versions)
    return found


def _versions(layout: Layout, readers: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """The tensors that one forward tensor becomes by scatters, each of which is its last reader."""
    by_last: dict[str, list[str]] = {}  # the last version so far -> all versions
    for node in layout.nodes:
        call = layout.calls.get(node.name)
        if node.phase != "forward" or call is None or call.target not in VIEW_OF_SCATTER:
            continue
        base = call.args[0]
        assert isinstance(base, torch.fx.Node)
        old = layout.storage[base]
        if readers[old][-1] == node.name:
            by_last[node.outputs[0]] = [*by_last.pop(old, [old]), *node.outputs]
    yield from by_last.values()


def _read_in_backward(layout: Layout, names: Sequence[str]) -> set[str]:
    """What the backward pass reads of these tensors and of all that is computed from them."""
    computed, read = set(names), set()
    for node in layout.nodes:
        if node.phase != "forward":
            read |= computed.intersection(node.inputs)
        elif not computed.isdisjoint(node.inputs):
            computed |= set(node.outputs)
    return read
