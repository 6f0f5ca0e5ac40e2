"""Restores tensors in plain attributes of modules after forward has written them in place.

A trace refuses such writes. A part of a model that is run instead of traced carries them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.model_calls import nested, storage_key

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, submodules and hooks."""


@contextlib.contextmanager
def tensors_restored(model: nn.Module) -> Iterator[list[tuple[nn.Module, str, Any]]]:
    """Restore the values of tensors in plain attributes that are written inside.

    Yields a list that is filled on exit: (module, name of the attribute, tensor) for each tensor
    that was restored.
    """
    before = [
        (module, attribute, tensor, tensor._version, tensor.detach().clone())
        for module, attribute, tensor in _plain_tensors(model)
    ]
    written: list[tuple[nn.Module, str, Any]] = []
    try:
        yield written
    finally:
        with torch.no_grad():
            for module, attribute, tensor, version, values in before:
                if tensor._version != version and tensor.shape == values.shape:
                    tensor.copy_(values)
                    written.append((module, attribute, tensor))


def _plain_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The tensors in plain attributes, each storage once; no views of parameters or buffers."""
    seen = {storage_key(t) for t in (*model.parameters(), *model.buffers()) if _is_plain(t)}
    for module in model.modules():
        for attribute, value in vars(module).items():
            for tensor in () if attribute in MODULE_ATTRIBUTES else nested.tensors(value):
                if _is_plain(tensor) and storage_key(tensor) not in seen:
                    seen.add(storage_key(tensor))
                    yield module, attribute, tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a storage, and a version counter that writes increase."""
    is_known = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_known and not tensor.is_inference()
