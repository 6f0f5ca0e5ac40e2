"""Calls of `torch.utils.checkpoint` by the model itself.

They do not change a trace: the operators inside are recorded once, like any others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from graphs.capture.threads import TRACING, in_this_thread

_WITHOUT_REENTRY = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # from torch 2.14 on
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(torch.utils.checkpoint, name)
)
"""The function that every checkpoint with `use_reentrant=False` calls."""


@contextlib.contextmanager
def at_each_checkpoint(notice: Callable[[], None]) -> Iterator[None]:
    """While inside, run `notice` before each call of `torch.utils.checkpoint.checkpoint`."""
    places: list[tuple[Any, str]] = [
        (torch.utils.checkpoint, _WITHOUT_REENTRY),
        (CheckpointFunction, "apply"),
    ]
    with TRACING, contextlib.ExitStack() as stack:
        for place, name in places:
            function = getattr(place, name)

            @functools.wraps(function)
            def call(*args: Any, _function: Callable[..., Any] = function, **kwargs: Any) -> Any:
                notice()
                return _function(*args, **kwargs)

            call.notice = notice  # type: ignore[attr-defined]  # for `call_checkpoints_directly`
            stack.enter_context(mock.patch.object(place, name, call))
        yield


@contextlib.contextmanager
def call_checkpoints_directly() -> Iterator[None]:
    """While inside, call the functions of reentrant checkpoints of this thread directly.

    In the backward pass, a checkpoint with `use_reentrant=True` calls its function again, on the
    model's own tensors and not on those of the trace. That cannot be recorded, and it would change
    the model's buffers. So while a model is traced, the function is called as if there were no
    checkpoint.

    An `at_each_checkpoint` around this context is still notified.
    """
    original: Any = CheckpointFunction.apply
    notice: Callable[[], None] = getattr(original, "notice", lambda: None)

    def call_directly(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        notice()
        # If no argument of a checkpoint requires a gradient, the parameters inside get none either.
        needs_gradient = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
        with torch.set_grad_enabled(needs_gradient and torch.is_grad_enabled()):
            return function(*args)

    call = in_this_thread(call_directly, original)
    call.notice = notice
    with mock.patch.object(CheckpointFunction, "apply", call):
        yield
