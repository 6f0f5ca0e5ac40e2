"""Puts a device guard for CUDA in place if there is no card.

Autograd asks the guard of a tensor's device for its stream, and a missing guard aborts the process.
PyTorch has a guard that does nothing, for this purpose. `ensureCUDADeviceGuardSet` (in
c10/core/impl/DeviceGuardImplInterface.cpp) replaces CUDA's guard by it, if there is a CUDA guard
that finds no device. A build without CUDA has no such guard to replace. So for a moment we register
one whose methods all return 0, also as the number of devices.

The guard that does nothing stays, and reports one device. At the first backward pass of a process,
autograd's engine starts a thread for each device, and a process with such threads cannot be forked
and then run backward passes. So one backward pass is run before there is a guard.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

_CUDA = 1
"""c10::DeviceType::CUDA"""
_N_METHODS = 128
"""Size of our guard's method table, larger than needed; all entries are the same function."""
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


@functools.cache
def has_device_guard() -> bool:
    """Put the guard that does nothing in place; returns whether fake CUDA tensors can be used."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).square().backward()  # type: ignore[no-untyped-call]
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        ensure()
        return True
    library = _c10()
    if library is None:
        return False
    registry = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, _REGISTRY)
    if registry[_CUDA] is not None:
        return True
    returns_zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _guard: 0)
    method = ctypes.cast(returns_zero, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _N_METHODS)(*[method] * _N_METHODS)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    register = getattr(library, _REGISTER)
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    register(_CUDA, ctypes.addressof(guard))
    ensure()
    if registry[_CUDA] == ctypes.addressof(guard):  # not replaced: it must not outlive this call
        registry[_CUDA] = None
    return registry[_CUDA] is not None


def _c10() -> ctypes.CDLL | None:
    """PyTorch's core library; None if it does not export what is needed (on Windows)."""
    for name in ("libc10.so", "libc10.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            return library if all(hasattr(library, s) for s in (_REGISTER, _REGISTRY)) else None
    return None
