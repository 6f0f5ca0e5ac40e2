"""Autograd's engine in a build of PyTorch with CUDA, where there is no driver.

For the accelerator that PyTorch was built with, the engine asks the driver for a device's context
(`GraphTask::stash_current_streams` in torch/csrc/autograd/engine.cpp), which fails without one.
Whether there is such an accelerator is a virtual method of PyTorch's hooks for CUDA
(`AcceleratorHooksInterface::isBuilt`). While inside, they have a table of methods in which this one
returns 0, so the engine runs as in a build without CUDA. `can_have_no_accelerator` checks by
PyTorch's own answer that the right method was replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_IS_BUILT = 2
"""Position of `isBuilt` among the virtual methods, after two destructors."""
_N_BEFORE = 2
"""What stands in front of a table of methods: an offset and the type."""
_N_METHODS = 128
"""More than the virtual methods of the hooks."""

_zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _hooks: 0)


def can_have_no_accelerator() -> bool:
    """Whether `no_accelerator` does what it says with this build of PyTorch."""
    with no_accelerator():
        return not _has_cuda()


@contextlib.contextmanager
def no_accelerator() -> Iterator[None]:
    """While inside, autograd's engine does not know of CUDA."""
    methods = _methods() if _has_cuda() else None
    if methods is None:
        yield
        return
    before = methods.value
    assert before is not None
    size = _N_BEFORE + _N_METHODS
    start = before - _N_BEFORE * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * size).from_buffer_copy((ctypes.c_void_p * size).from_address(start))
    table[_N_BEFORE + _IS_BUILT] = ctypes.cast(_zero, ctypes.c_void_p).value
    methods.value = ctypes.addressof(table) + before - start
    try:
        yield
    finally:
        methods.value = before


def _has_cuda() -> bool:
    """Whether PyTorch says that it was built for CUDA."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "cuda"


@functools.cache
def _methods() -> ctypes.c_void_p | None:
    """Where the hooks of CUDA have the address of their table of methods (None: not known)."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    if library is None or not hasattr(library, _HOOKS):
        return None
    hooks = getattr(library, _HOOKS)
    hooks.restype = ctypes.c_void_p
    return ctypes.c_void_p.from_address(hooks())
