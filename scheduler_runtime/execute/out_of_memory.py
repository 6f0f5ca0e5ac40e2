"""Recognise out-of-memory errors."""

from __future__ import annotations

import torch

_OF_OTHER_ALLOCATORS = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of a RuntimeError's message: from PyTorch's CPU allocator, and for a cuBLAS handle."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out, so that a step that takes less may run."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _OF_OTHER_ALLOCATORS)
