"""Detects calls of `torch.utils.checkpoint` by the model itself.

They do not change a trace: the operators inside are recorded once, like any others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.utils.checkpoint

from graphs.capture.joint_graph import TRACING


@contextlib.contextmanager
def at_each_checkpoint(notice: Callable[[], None]) -> Iterator[None]:
    """While inside, run `notice` before each call of `torch.utils.checkpoint.checkpoint`."""
    checkpoints = torch.utils.checkpoint
    places: list[tuple[Any, str]] = [
        (checkpoints, "_checkpoint_without_reentrant_generator"),
        (checkpoints.CheckpointFunction, "apply"),
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
