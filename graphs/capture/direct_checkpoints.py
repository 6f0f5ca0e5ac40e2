"""Calls of `torch.utils.checkpoint` with `use_reentrant=True`, while a model is traced.

Its backward pass calls the function once more, on the model's own tensors and not on those of the
trace: that is no operator of a graph, and it would change the model's buffers. So the function is
called directly, as by a model without its checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointFunction


@contextlib.contextmanager
def reentrant_called_directly() -> Iterator[None]:
    """Call the functions of such checkpoints directly, while inside and in this thread.

    Others that notice these calls (`at_each_checkpoint`), from outside, still do.
    """
    here = threading.get_ident()
    original: Any = CheckpointFunction.apply
    notice: Callable[[], None] = getattr(original, "notice", _nothing)

    def call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if threading.get_ident() != here:
            return original(function, preserve_rng_state, *args)
        notice()
        # A checkpoint whose arguments need no gradient gives none to the parameters inside either.
        needs = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)

    call.notice = notice  # type: ignore[attr-defined]
    with mock.patch.object(CheckpointFunction, "apply", call):
        yield


def _nothing() -> None:
    pass
