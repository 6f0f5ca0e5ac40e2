"""The lock that is held while tracing.

A trace patches things of the whole process (kernels of operators, branches of libraries, global
module hooks, AOTAutograd's settings), so threads take turns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

TRACING = threading.RLock()
_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that it holds `TRACING` while it runs."""

    @functools.wraps(function)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with TRACING:
            return function(*args, **kwargs)

    return locked
