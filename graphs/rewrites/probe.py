"""Whether row chunks keep every bit here: a property of the device's kernels, tried on it.

Each node that runs by chunks is run on a few rows of its own width, all at once and in chunks, and
PyTorch's `nll_loss` on the picked column and on the whole.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphs import hardware
from graphs.rewrites.row_chunks import ALIGNED_ROWS, RowChunks

aten = torch.ops.aten
N_ROWS = 3 * ALIGNED_ROWS
N_CLASSES = 8
"""Of the losses that are compared; a loss reads one element of a row."""


def keeps_bits(graph: fx.Graph, costs: Any) -> bool:
    """Whether the row-chunk nodes of a program have the same bits by chunks as at once.

    costs: the description of the cost model. Nothing is tried where it is of a CUDA device and
    there is none here.
    """
    if hardware.is_cuda(costs) and not torch.cuda.is_available():
        return True
    return all(_keeps(node) for node in graph.nodes if isinstance(node.target, RowChunks))


def _keeps(node: fx.Node) -> bool:
    chunks: Any = node.target
    values = [argument.meta["val"] for argument in node.all_input_nodes]
    forms = tuple(
        (tuple(value.shape[1:] if at in chunks.row_inputs else value.shape), value.dtype)
        for at, value in enumerate(values)
    )
    device, n_rows = values[0].device, values[0].shape[0]
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng():
        same = _same(chunks, forms, device, torch.get_num_threads())
        return same and _same_loss(n_rows, device)


@functools.cache
def _same(chunks: RowChunks, forms: Any, device: torch.device, n_threads: int) -> bool:
    """n_threads: what the answer may depend on besides."""
    torch.manual_seed(0)
    width = max(shape[0] for shape, _ in forms if shape)
    args = []
    for at, (shape, dtype) in enumerate(forms):
        shape = (N_ROWS, *shape) if at in chunks.row_inputs else shape
        if dtype.is_floating_point:  # as log-probabilities are
            args.append(torch.empty(shape, device=device).uniform_(-9, -1).to(dtype))
        else:
            args.append(torch.randint(0, width, shape, device=device, dtype=dtype))
    whole, by_chunks = (
        dataclasses.replace(chunks, rows_per_chunk=n)(*args) for n in (N_ROWS, ALIGNED_ROWS)
    )
    return _are_equal(whole, by_chunks)


@functools.cache
def _same_loss(n_rows: int, device: torch.device) -> bool:
    torch.manual_seed(0)
    values = -torch.rand(n_rows, N_CLASSES, device=device)
    target = torch.randint(-1, N_CLASSES, (n_rows,), device=device)
    ignored = target == -1
    column = values.gather(1, target.masked_fill(ignored, 0).unsqueeze(1))
    marks = torch.where(ignored, -1, 0)
    return all(
        _are_equal(
            aten.nll_loss_forward.default(values, target, None, reduction, -1),
            aten.nll_loss_forward.default(column, marks, None, reduction, -1),
        )
        for reduction in (0, 1, 2)
    )


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
