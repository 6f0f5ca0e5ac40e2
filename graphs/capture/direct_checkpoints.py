"""Traces `torch.utils.checkpoint` with `use_reentrant=True` as a direct call of its function.

In the backward pass, such a checkpoint calls its function again, on the model's own tensors and not
on those of the trace. That cannot be recorded, and it would change the model's buffers. So while a
model is traced, the function is called directly, as if there were no checkpoint.
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
def call_checkpoints_directly() -> Iterator[None]:
    """While inside, call the functions of reentrant checkpoints of this thread directly.

    An `at_each_checkpoint` around this context is still notified.
    """
    here = threading.get_ident()
    original: Any = CheckpointFunction.apply
    notice: Callable[[], None] = getattr(original, "notice", _ignore)

    def call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if threading.get_ident() != here:
            return original(function, preserve_rng_state, *args)
        notice()
        # If no argument of a checkpoint requires a gradient, the parameters inside get none either.
        needs_gradient = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
        with torch.set_grad_enabled(needs_gradient and torch.is_grad_enabled()):
            return function(*args)

    call.notice = notice  # type: ignore[attr-defined]
    with mock.patch.object(CheckpointFunction, "apply", call):
        yield


def _ignore() -> None:
    pass
