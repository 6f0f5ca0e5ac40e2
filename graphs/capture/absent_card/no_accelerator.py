"""Lets autograd's engine run in a build of PyTorch with CUDA on a machine without a driver.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

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
