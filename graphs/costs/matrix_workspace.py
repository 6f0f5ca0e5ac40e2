"""Workspace of matrix decompositions and solvers on the CPU, which LAPACK computes in place.

Most first copy the matrices into column-major order. What they allocate besides was compared with
the profiler's memory events (torch 2.13 with MKL, float32 and complex64, single matrices and
batches of 64 to 1024 rows). The estimates are right up to a few rows, since LAPACK chooses the size
of its blocks. They are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphs.costs.layouts import TRANSPOSED_BLOCK
from graphs.costs.operators import OpCall, aten


def _copy_and_rows(position: int, n_rows: int = 0) -> Callable[[OpCall], int]:
    """An estimate: a copy of the argument at this position, and at most `n_rows` rows besides."""

    def estimate(call: OpCall) -> int:
        x: torch.Tensor = call.args[position]
        block = TRANSPOSED_BLOCK if x.dim() == 2 else 0
        return x.nbytes + max(block, n_rows * max(x.shape[-2:])) * x.element_size()

    return estimate


def _block_of_rows(call: OpCall) -> int:
    """A block of 32 or 64 rows, depending on the size, and two more."""
    x: torch.Tensor = call.args[0]
    n = max(x.shape[-2:])
    return int((34 if n <= 320 else 66) * n * x.element_size())


def _eigh(call: OpCall) -> int:
    """Without eigenvectors a copy and some rows; with them the workspace that LAPACK's syevd or
    heevd asks for, for one matrix at a time."""
    x: torch.Tensor = call.args[0]
    wants_vectors = call.args[2] if len(call.args) > 2 else call.kwargs.get("compute_v", True)
    if not wants_vectors:
        return _copy_and_rows(0, 26)(call)
    n, size = x.shape[-1], x.element_size()
    integers_bytes = 4 * (3 + 5 * n)
    if not x.is_complex():
        return size * (1 + 6 * n + 2 * n * n) + integers_bytes
    n_elements = 26 * n + n * n + (TRANSPOSED_BLOCK if x.dim() == 2 else 0)
    return size * n_elements + size // 2 * (1 + 5 * n + 2 * n * n) + integers_bytes


MATRICES: Mapping[Any, Callable[[OpCall], int]] = {
    aten._linalg_eigh: _eigh,
    aten._linalg_svd: _copy_and_rows(0),
    aten.linalg_inv_ex: lambda call: call.args[0].nbytes,
    aten.linalg_lu: _copy_and_rows(0),
    aten.cholesky_solve: _copy_and_rows(1),
    aten.ormqr: _copy_and_rows(0, 64),
    aten.linalg_qr: _block_of_rows,
    aten.linalg_householder_product: _block_of_rows,
}
