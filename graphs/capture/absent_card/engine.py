"""Lets autograd's engine run on fake CUDA tensors, without asking a card for its stream.

The engine sums gradients on an accelerator on the stream that has computed them, or, if there is
none, on the device's current stream (torch/csrc/autograd/input_buffer.cpp), which a build without
CUDA does not have. So the engine, and only the engine, is told that gradients are on the CPU. Fake
tensors report their device from Python, where the answer can be changed; the functional wrappers of
a trace are made to do so too.

For the accelerator that PyTorch was built with, the engine asks the driver for a device's context
(`GraphTask::stash_current_streams` in torch/csrc/autograd/engine.cpp), which fails without a
driver. Whether there is such an accelerator is decided by a virtual method of PyTorch's CUDA hooks
(`AcceleratorHooksInterface::isBuilt`). Inside of `no_accelerator`, the hooks have a method table in
which this method returns 0, so the engine runs as in a build without CUDA.
`can_have_no_accelerator` asks PyTorch whether the right method was replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

_DISPATCH_DEVICE = 10
"""Position of `dispatch_device` among the arguments of `_make_wrapper_subclass` after the class."""
_WRAPPERS = ("_compile.py", "eval_frame.py")
"""Files of PyTorch whose functions wrap a dispatch mode's method."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """While inside, gradients of fake CUDA tensors can be computed without a card."""
    original_make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

    def make_functional_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is FunctionalTensor and len(args) > _DISPATCH_DEVICE:
            args = (*args[:_DISPATCH_DEVICE], True, *args[_DISPATCH_DEVICE + 1 :])
        return original_make_wrapper(cls, *args, **kwargs)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with no_accelerator(), _EngineOnCpu():  # type: ignore[no-untyped-call]
            return _engine_run_backward(*args, **kwargs)

    own_device = property(lambda tensor: tensor.elem.device)
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(
            torch.Tensor, "_make_wrapper_subclass", staticmethod(make_functional_wrapper)
        ),
        mock.patch.object(FunctionalTensor, "device", own_device, create=True),
    ):
        yield


class _EngineOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the CPU as a tensor's device if the engine asks, and the true device otherwise.

    The device may also be asked for by Python code, or by operators that it calls.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        only_moves = func is torch.ops.aten._to_copy.default and list(kwargs or {}) == ["device"]
        if only_moves and args[0].device == kwargs["device"]:
            # The engine believes that gradients are on the CPU, and moves them to their device. On
            # a card there is no such operator; here it would change the numbers in nodes' names.
            return args[0]
        value = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            return value
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
            frame = frame.f_back
        # It is the engine that asks if the innermost Python frame is the one that called it.
        is_of_engine = frame is not None and frame.f_code is _engine_run_backward.__code__
        return torch.device("cpu") if is_of_engine else value


_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_IS_BUILT = 2
"""Position of `isBuilt` in the method table, after two destructors."""
_N_BEFORE = 2
"""Entries in front of a method table: an offset and the type."""
_N_METHODS = 128
"""Entries of the method table to copy, more than the hooks have methods."""

_returns_zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _hooks: 0)


def can_have_no_accelerator() -> bool:
    """Whether `no_accelerator` works with this build of PyTorch."""
    with no_accelerator():
        return not _has_cuda()


@contextlib.contextmanager
def no_accelerator() -> Iterator[None]:
    """While inside, autograd's engine does not know of CUDA. Nested uses have no further effect."""
    hooks = _hooks() if _has_cuda() else None
    if hooks is None:
        yield
        return
    before = hooks.methods.value
    hooks.methods.value = hooks.without_cuda
    try:
        yield
    finally:
        hooks.methods.value = before


def _has_cuda() -> bool:
    """Whether PyTorch says that it was built for CUDA."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "cuda"


@dataclass(frozen=True)
class _Hooks:
    """PyTorch's CUDA hooks, and a method table for them in which `isBuilt` returns 0.

    methods: the field of the hooks object that has the address of its method table.
    table: the changed copy of the table. It is kept for good, as another thread may be using it.
    without_cuda: address of the first method in the changed table.
    """

    methods: ctypes.c_void_p
    table: ctypes.Array[ctypes.c_void_p]
    without_cuda: int


@functools.cache
def _hooks() -> _Hooks | None:
    """Find the CUDA hooks; None if this build of PyTorch does not export them."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    if library is None or not hasattr(library, _HOOKS):
        return None
    find = getattr(library, _HOOKS)
    find.restype = ctypes.c_void_p
    methods = ctypes.c_void_p.from_address(find())
    assert methods.value is not None
    offset = _N_BEFORE * ctypes.sizeof(ctypes.c_void_p)
    table_type = ctypes.c_void_p * (_N_BEFORE + _N_METHODS)
    table = table_type.from_buffer_copy(table_type.from_address(methods.value - offset))
    table[_N_BEFORE + _IS_BUILT] = ctypes.cast(_returns_zero, ctypes.c_void_p).value
    return _Hooks(methods, table, ctypes.addressof(table) + offset)
