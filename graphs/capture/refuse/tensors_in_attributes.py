"""Tensors in plain attributes of modules: what forward writes into them is put back.

A trace refuses such writes. Where a part of a model is run instead, they are done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.model_calls import nested


@contextlib.contextmanager
def tensors_put_back(model: nn.Module) -> Iterator[list[tuple[nn.Module, str, Any]]]:
    """Restore values that are written inside.

    Yields a list that names, afterwards, the modules and attributes where they were, with tensors.
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
    """Those in attributes, each once, but for parameters, buffers and views of them."""
    seen = {_storage(t) for t in (*model.parameters(), *model.buffers()) if _is_plain(t)}
    own = {*vars(nn.Module())}
    for module in model.modules():
        for attribute, value in vars(module).items():
            for tensor in () if attribute in own else nested.tensors(value):
                if _is_plain(tensor) and _storage(tensor) not in seen:
                    seen.add(_storage(tensor))
                    yield module, attribute, tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has a storage, and counts what is written into it."""
    is_known = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_known and not tensor.is_inference()
