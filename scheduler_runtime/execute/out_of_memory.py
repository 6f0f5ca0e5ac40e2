"""Errors that say that memory is used up."""

from __future__ import annotations

import torch

_OF_OTHER_ALLOCATORS = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
"""In the text of a RuntimeError: PyTorch's allocator for the CPU, and a cuBLAS handle."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step with less memory may run where this error was raised."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _OF_OTHER_ALLOCATORS)
