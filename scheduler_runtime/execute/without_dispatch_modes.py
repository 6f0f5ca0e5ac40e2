"""Dispatch modes that are taken off before what eager mode runs without them.

While any dispatch mode is there, PyTorch's backward function of `prod` takes another formula, of
other last bits, even if the mode does nothing. So does that of `masked_fill` for a value that is
trained; it is not treated here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)


class Watching(TorchDispatchMode, ABC):
    """A mode that only looks; it may be there longer than it has something to look at."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it does nothing any more."""


def leave_modes(*, if_over: bool) -> None:
    """Take such modes off, if they are on top; to be called within a function of the engine only.

    The engine gives each function the thread's state as `backward()` was called with, so this
    lasts until the function returns.

    if_over: only those that do nothing any more.
    """
    stack = _get_current_dispatch_mode_stack()
    while stack and isinstance(top := stack.pop(), Watching) and (top.is_over or not if_over):
        _pop_mode()
