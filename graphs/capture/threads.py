"""Tracing in a process with several threads.

A trace patches things of the whole process (kernels of operators, branches of libraries, global
module hooks, AOTAutograd's settings), so threads take turns. Meanwhile another thread may run a
step, with the original functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from graphs.capture.dispatch_keys import dispatch_keys_kept

TRACING = threading.RLock()
_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that it holds `TRACING` while it runs, and leaves the thread's
    dispatch keys as they are."""

    @functools.wraps(function)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with TRACING, dispatch_keys_kept():
            return function(*args, **kwargs)

    return locked


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Any:
    """A function that calls `replacement` in the present thread, and `original` in all others."""
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    return call
