"""Dispatch modes that step aside for backward functions that behave differently under any mode.

While any dispatch mode is active, even one that does nothing, PyTorch's backward functions of some
operators use another formula, whose results are not bitwise identical
(`graphs.capture.as_eager.gradients` lists them); that of `ormqr` gives its gradients another memory
layout.
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
MODE_SENSITIVE = (
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
"""Operators whose backward functions look for dispatch modes, and behave differently with one."""


class WatchingMode(TorchDispatchMode, ABC):
    """A mode that only observes operators; it may stay active after it has nothing to observe.

    It is entered by `watch` and left by `unwatch`, which do not touch the flags that PyTorch keeps
    beside the stack of modes. The flags belong to the process, the stack to a thread, so two
    threads that restore the flags in turn could leave them set for good.
    """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the mode has nothing to observe any more."""

    @abstractmethod
    def note_missed_backward(self) -> None:
        """Called when a backward function will run without this mode."""

    @staticmethod
    def call_operator(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call an operator from the mode's handler, with the result that it has without the mode.

        PyTorch calls a mode's handler with the dispatch keys of lazy conjugation excluded, so a
        kernel that conjugates and calls other operators (`linalg.pinv`) would compute with numbers
        that are not conjugated.
        """
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor):
            excluded = excluded.remove(key)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return func(*args, **(kwargs or {}))

    def watch(self) -> None:
        """Enter the mode. Operators in `MODE_SENSITIVE` run their backward functions without it."""
        _thread_state.__dict__[self._key] = _kernels.register()
        _push_mode(self)

    def unwatch(self) -> None:
        """Leave the mode, which must be on top of the stack."""
        _pop_mode()
        # it is missing if the engine has put back a mode that was left within a backward pass
        _thread_state.__dict__.pop(self._key, None)

    @property
    def _key(self) -> str:
        return f"watch {id(self)}"


_thread_state = threading.local()
"""Keeps the kernels alive for each mode on this thread's stack, at most as long as the thread."""


class _Registration:
    """Keeps the kernels registered, for as long as it exists."""


class _Kernels:
    """Kernels of the operators in `MODE_SENSITIVE` for the autograd keys, while a mode watches.

    They get hold of each result's backward function before anything can call it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a watch within a call
        self._n_registrations = self._n_running = 0
        self._library: Any = None

    def register(self) -> _Registration:
        """Register the kernels, until all objects that this has returned are gone."""
        with self._lock:
            self._n_registrations += 1
            if self._library is None:
                self._library = library = torch.library.Library("aten", "IMPL")
                for operator in MODE_SENSITIVE:
                    run = functools.partial(_call_with_modeless_backward, operator)
                    for key in ("AutogradCPU", "AutogradCUDA"):
                        library.impl(operator, run, key)
        registration = _Registration()
        weakref.finalize(registration, self._release).atexit = False
        return registration

    def _release(self) -> None:
        with self._lock:
            self._n_registrations -= 1
            # kernels must not be dropped while one runs: then the next watch that ends drops them
            if not self._n_registrations and not self._n_running and self._library is not None:
                self._library._destroy()
                self._library = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this context, the kernels are not dropped, since one of them runs."""
        with self._lock:
            self._n_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_running -= 1


_kernels = _Kernels()


def _call_with_modeless_backward(operator: Any, *args: Any, **named: Any) -> Any:
    """Call the operator; its backward function will leave the modes that watch now."""
    with _kernels.running():
        result = operator._op_dk(DispatchKey.Autograd, *args, **named)
    watching = [
        each for each in _get_current_dispatch_mode_stack() if isinstance(each, WatchingMode)
    ]
    if watching and result.grad_fn is not None:
        result.grad_fn.register_prehook(lambda _gradients: leave_modes(only_finished=False))
        for each in watching:
            each.note_missed_backward()
    return result


@contextmanager
def no_watching_modes() -> Iterator[None]:
    """In this context, the watching modes on top of this thread's stack are inactive, so that
    operators run exactly as without them."""
    paused = []
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], WatchingMode):
        paused.append(_pop_mode())
    try:
        yield
    finally:
        for each in reversed(paused):
            _push_mode(each)


def leave_modes(*, only_finished: bool) -> None:
    """Leave the watching modes on top of the stack; only to be called within a backward function.

    The engine runs each backward function with the thread's state of the call of `backward()`, so
    the modes are inactive until the function returns.

    only_finished: whether to leave only modes that have nothing to observe any more.
    """
    stack = _get_current_dispatch_mode_stack()
    while (
        stack
        and isinstance(top := stack.pop(), WatchingMode)
        and (top.is_over or not only_finished)
    ):
        _pop_mode()
