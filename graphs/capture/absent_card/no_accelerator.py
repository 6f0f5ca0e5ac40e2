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
from dataclasses import dataclass
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
    """While inside, autograd's engine does not know of CUDA. Nested, the outermost counts."""
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
    """methods: where the hooks of CUDA have the address of their table of methods.
    table: the one in which `isBuilt` returns 0, kept as another thread may be in it. Its methods
    begin at without_cuda.
    """

    methods: ctypes.c_void_p
    table: ctypes.Array[ctypes.c_void_p]
    without_cuda: int


@functools.cache
def _hooks() -> _Hooks | None:
    """None: this build of PyTorch does not say where they are."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    if library is None or not hasattr(library, _HOOKS):
        return None
    find = getattr(library, _HOOKS)
    find.restype = ctypes.c_void_p
    methods = ctypes.c_void_p.from_address(find())
    assert methods.value is not None
    offset = _N_BEFORE * ctypes.sizeof(ctypes.c_void_p)
    table_of = ctypes.c_void_p * (_N_BEFORE + _N_METHODS)
    table = table_of.from_buffer_copy(table_of.from_address(methods.value - offset))
    table[_N_BEFORE + _IS_BUILT] = ctypes.cast(_zero, ctypes.c_void_p).value
    return _Hooks(methods, table, ctypes.addressof(table) + offset)
