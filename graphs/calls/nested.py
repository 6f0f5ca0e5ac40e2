"""Nested values with tensors in them: what a model is called with, and what it returns.

PyTorch's own pytree goes through tuples, lists, dicts, named tuples and the classes registered with
it (such as the outputs of transformers). Here dataclasses are gone through as well, when there is a
tensor in them. They are opened for the moment only: registering a stranger's class would change
what the rest of the process does with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Spec = pytree.TreeSpec
unflatten = pytree.tree_unflatten


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves in order, and what `unflatten(leaves, spec)` puts them into."""
    return pytree.tree_flatten(_opened(value, ()))


def leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(_opened(value, ()))


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def paths(spec: Spec) -> list[tuple[Any, ...]]:
    """Where each leaf stands, as pytree's keys (`torch.utils._pytree.keystr` writes them out)."""
    # in the places of the leaves tensors, since a dataclass without any is not opened
    like = unflatten([torch.empty(0)] * spec.num_leaves, spec)
    return [path for path, _ in pytree.tree_flatten_with_path(_opened(like, ()))[0]]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same nested value with every tensor changed; nothing is written into the given one."""
    flat, spec = flatten(value)
    return unflatten(
        [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], spec
    )


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A dataclass instance as its class and its attributes, fields first."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


def _opened(value: Any, around: tuple[int, ...]) -> Any:
    """`value` with its dataclass instances opened. around: ids of those that it is inside of."""

    def opened(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type) or id(leaf) in around:
            return leaf
        attributes = {f.name: None for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
        names = tuple(attributes | getattr(leaf, "__dict__", {}))
        inside = (*around, id(leaf))
        values = tuple(_opened(getattr(leaf, name), inside) for name in names)
        # one without tensors is a setting: it keeps its identity
        if not any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(values)):
            return leaf
        return _Opened(type(leaf), names, values)

    return pytree.tree_map(opened, value)


def _closed(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """The instance again. Its __init__ does not run: it may check or change what it is given."""
    kind, names = context
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


pytree.register_pytree_node(
    _Opened,
    lambda opened: (list(opened.values), (opened.kind, opened.names)),
    _closed,
    flatten_with_keys_fn=lambda opened: (
        [(pytree.GetAttrKey(n), v) for n, v in zip(opened.names, opened.values, strict=True)],
        (opened.kind, opened.names),
    ),
)
