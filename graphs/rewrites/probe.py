"""Tests whether row chunks give bitwise identical results, which depends on the device's kernels.

Each node that runs in chunks is run on a few rows of its own width, all at once and in chunks. For
a loss of a picked column, PyTorch's `nll_loss` is run on the column and on the whole tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphs import hardware
from graphs.rewrites.chunk_sizes import ALIGNED_ROWS
from graphs.rewrites.row_chunks import RowChunks

aten = torch.ops.aten
N_ROWS = 3 * ALIGNED_ROWS + 1  # so that the last chunk is as short as possible
N_POSITIONS = 256
"""How many exponentials are compared."""
N_CLASSES = 8
"""The number of classes in the losses that are compared; a loss reads one element per row, so few
suffice."""


def keeps_bits(graph: fx.Graph, costs: Any) -> bool:
    """Whether all row-chunk nodes of a program give the same bits in chunks as all at once.

    costs: the description of the cost model. If it is for a CUDA device and there is none here,
        nothing is tried and the answer is True. {}: the program will run on this machine, whatever
        it was planned for.
    """
    if hardware.is_cuda(costs) and not torch.cuda.is_available():
        return True
    in_chunks = [n for n in graph.nodes if isinstance(n.target, RowChunks) or _is_loss_of_column(n)]
    if not in_chunks:
        return True
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng():
        return all(map(_node_keeps_bits, in_chunks))


def _node_keeps_bits(node: fx.Node) -> bool:
    chunks: Any = node.target
    n_threads = torch.get_num_threads()
    values = [argument.meta["val"] for argument in node.all_input_nodes]
    if not isinstance(chunks, RowChunks):  # nll_loss(column, target, weight, reduction, ...)
        column, reduction = values[0], int(node.args[3])  # type: ignore[arg-type]
        return _same_loss_of_column(
            column.shape[0], column.dtype, reduction, column.device, n_threads
        )
    forms = tuple(
        (tuple(value.shape[1:] if at in chunks.row_inputs else value.shape), value.dtype)
        for at, value in enumerate(values)
    )
    device = values[0].device
    if chunks.has_exponentials:
        dtypes = {dtype for _, dtype in forms if dtype.is_floating_point} | {torch.float32}
        if not all(_same_exponentials(dtype, device) for dtype in dtypes):
            return False
    return _same_in_chunks(chunks, forms, device, n_threads)


def _is_loss_of_column(node: fx.Node) -> bool:
    """Whether the node is an nll_loss of the column that a row-chunk node has picked."""
    if node.target is not aten.nll_loss_forward.default:
        return False
    source: Any = node.args[0]
    is_column = source.meta["val"].shape[1:] == (1,)
    maker = source.args[0] if source.target is operator.getitem else source
    return is_column and isinstance(maker.target, RowChunks)


@functools.cache
def _same_in_chunks(chunks: RowChunks, forms: Any, device: torch.device, n_threads: int) -> bool:
    """Whether a row-chunk node gives the same bits in chunks as all at once.

    forms: shape (of a row, for row inputs) and dtype of each input.
    n_threads: not used, but part of the cache's key, since the answer may depend on it.
    """
    torch.manual_seed(0)
    width = max(shape[0] for shape, _ in forms if shape)
    args = []
    for at, (shape, dtype) in enumerate(forms):
        shape = (N_ROWS, *shape) if at in chunks.row_inputs else shape
        if dtype.is_floating_point:  # as log-probabilities are
            args.append(torch.empty(shape, device=device).uniform_(-9, -1).to(dtype))
        else:
            high = 2 if dtype == torch.bool else width
            args.append(torch.randint(0, high, shape, device=device, dtype=dtype))
    whole, by_chunks = (
        dataclasses.replace(chunks, rows_per_chunk=n)(*args) for n in (N_ROWS, ALIGNED_ROWS)
    )
    return _are_equal(whole, by_chunks)


@functools.cache
def _same_exponentials(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an exponential is independent of its position in the tensor and of the tensor's size.

    A kernel may compute the remainder at the end of a vector, or of a thread's share, in another
    way. Comparing only a few rows would seldom show that.
    """
    torch.manual_seed(0)
    values = torch.empty(N_POSITIONS, device=device).uniform_(-20, 5).to(dtype)
    whole = values.exp()
    return all(
        torch.equal(values[start : start + n].exp(), whole[start : start + n])
        for start in range(16)
        for n in range(1, N_POSITIONS - start, 3)
    )


@functools.cache
def _same_loss_of_column(
    n_rows: int, dtype: torch.dtype, reduction: int, device: torch.device, n_threads: int
) -> bool:
    """Whether nll_loss of a picked column gives the bits of nll_loss of the whole tensor."""
    torch.manual_seed(0)
    values = -torch.rand(n_rows, N_CLASSES, device=device).to(dtype)
    target = torch.randint(-1, N_CLASSES, (n_rows,), device=device)
    ignored = target == -1
    column = values.gather(1, target.masked_fill(ignored, 0).unsqueeze(1))
    marks = torch.where(ignored, -1, 0)
    return _are_equal(
        aten.nll_loss_forward.default(values, target, None, reduction, -1),
        aten.nll_loss_forward.default(column, marks, None, reduction, -1),
    )


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
