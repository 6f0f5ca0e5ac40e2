"""Dispatch modes that are taken off before what eager mode runs without them.

While any dispatch mode is there, even one that does nothing, PyTorch's backward functions of some
operators take another formula, of other bits (`graphs.capture.as_eager.gradients` says which, and
`ormqr` gives its gradients another layout).
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

aten = torch.ops.aten
LOOKING = (
    aten.prod.default,
    aten.prod.dim_int,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.max.default,
    aten.min.default,
    aten.median.default,
    aten.nanmedian.default,
    aten.cumprod.default,
    aten.cumprod_.default,
    aten.ormqr.default,
)
"""Operators whose backward functions look for dispatch modes, and compute otherwise with one."""


class Watching(TorchDispatchMode, ABC):
    """A mode that only looks; it may be there longer than it has something to look at.

    It is entered by `watch` and left by `unwatch`, which leave alone the flags that PyTorch keeps
    beside the stack: they are of the process and the stack is of a thread, so two threads that
    restore them in turn would set them for good.
    """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it does nothing any more."""

    @abstractmethod
    def misses(self) -> None:
        """A backward function runs without this mode."""

    @staticmethod
    def called(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the operator returns without the mode.

        PyTorch calls a mode's handler with the keys of lazy conjugation left out, so a kernel that
        conjugates and calls others (`linalg.pinv`) would compute with the numbers as they were.
        """
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor):
            excluded = excluded.remove(key)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return func(*args, **(kwargs or {}))

    def watch(self) -> None:
        """Enter it. What `LOOKING` names runs its backward function without it."""
        _of_thread.__dict__[self._key] = _kernels.held()
        _push_mode(self)

    def unwatch(self) -> None:
        """Leave it; it is on top."""
        _pop_mode()
        # not there: the engine has put back a mode that was left within a backward pass
        _of_thread.__dict__.pop(self._key, None)

    @property
    def _key(self) -> str:
        return f"watch {id(self)}"


_of_thread = threading.local()
"""What holds the kernels for each mode on this thread's stack: it ends with the thread, too."""


class _Held:
    """The kernels are there as long as one of these is."""


class _Kernels:
    """The operators at their autograd keys, while a mode watches: each result's backward function
    is known before anything can call it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a watch within a call
        self._n_holding = self._n_running = 0
        self._library: Any = None

    def held(self) -> _Held:
        with self._lock:
            self._n_holding += 1
            if self._library is None:
                self._library = library = torch.library.Library("aten", "IMPL")
                for operator in LOOKING:
                    run = functools.partial(_without_modes, operator)
                    for key in ("AutogradCPU", "AutogradCUDA"):
                        library.impl(operator, run, key)
        held = _Held()
        weakref.finalize(held, self._release).atexit = False
        return held

    def _release(self) -> None:
        with self._lock:
            self._n_holding -= 1
            # one that runs must not be dropped: then the next watch that ends drops them
            if not self._n_holding and not self._n_running and self._library is not None:
                self._library._destroy()
                self._library = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """One of them runs, and must not be dropped meanwhile."""
        with self._lock:
            self._n_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_running -= 1


_kernels = _Kernels()


def _without_modes(operator: Any, *args: Any, **named: Any) -> Any:
    """The operator; its backward function leaves the modes that watch now."""
    with _kernels.running():
        result = operator._op_dk(DispatchKey.Autograd, *args, **named)
    watching = [each for each in _get_current_dispatch_mode_stack() if isinstance(each, Watching)]
    if watching and result.grad_fn is not None:
        result.grad_fn.register_prehook(lambda _gradients: leave_modes(if_over=False))
        for each in watching:
            each.misses()
    return result


@contextmanager
def nothing_watches() -> Iterator[None]:
    """What runs in it is not seen by the modes that are on top of this thread's stack, and takes
    what it takes without them."""
    paused = []
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], Watching):
        paused.append(_pop_mode())
    try:
        yield
    finally:
        for each in reversed(paused):
            _push_mode(each)


def leave_modes(*, if_over: bool) -> None:
    """Take such modes off, if they are on top; to be called within a function of the engine only.

    The engine gives each function the thread's state as `backward()` was called with, so this
    lasts until the function returns.

    if_over: only those that do nothing any more.
    """
    stack = _get_current_dispatch_mode_stack()
    while stack and isinstance(top := stack.pop(), Watching) and (top.is_over or not if_over):
        _pop_mode()
