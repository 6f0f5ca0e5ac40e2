"""Workspace of operators on the CPU, estimated without running them. All estimates are in bytes.

Convolutions matter most (a tenth of a step's peak in a ResNet): oneDNN reorders tensors into blocks
of 16 channels, convolves these, and reorders the result. The estimates follow the order in which it
makes these copies. Compared with the profiler's memory events on an x86 machine with AVX-512 and
torch 2.13 (`tests/graphs/costs/test_workspace.py` repeats this), they are off by a few percent of
the bytes of a float32 convolution's tensors. With AVX2 oneDNN mostly takes less, but can take some
kilobytes more (`docs/limits.md`); with SSE alone it may take more. Other machines choose other
layouts; for exact bytes, measure. For CUDA, see `graphs.costs.cuda_workspace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphs.costs.convolution_workspace import (
    contiguous_copy_bytes,
    convolution,
    convolution_backward,
)
from graphs.costs.layouts import (
    COPIES,
    copied_bytes,
    suggested_format,
    transposed_block_bytes,
)
from graphs.costs.matrix_workspace import MATRICES
from graphs.costs.operators import OpCall, aten, expanded_shape
from graphs.costs.promotion import mean_bytes, number_bytes, promotion_bytes


def cpu_workspace_bytes(call: OpCall) -> int:
    """Bytes that the call allocates besides inputs and outputs while it runs on the CPU."""
    estimate = _ESTIMATES.get(call.packet) or _GRADIENT_ESTIMATES.get(str(call.packet))
    return promotion_bytes(call) if estimate is None else estimate(call)


def _is_dense(*tensors: torch.Tensor) -> bool:
    """Whether all are contiguous, or all in the channels-last layout."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return any(all(t.is_contiguous(memory_format=each) for t in tensors) for each in formats)


def _batch_norm_backward(call: OpCall) -> int:
    """As much as the input's gradient if gradient and input have the same layout. Otherwise one
    element per channel and, for 16-bit inputs, a gradient in 32 bits, which kernels for some pairs
    of layouts do not allocate (native/Normalization.cpp)."""
    gradient, x = call.inputs()[:2]
    if _is_dense(gradient, x):
        return x.nbytes if call.args[-1][0] else 0
    return x.shape[1] * x.element_size() + _float32_copy_bytes(x)


def _float32_copy_bytes(x: torch.Tensor) -> int:
    """Bytes of a copy of `x` in 32 bits; 0 if it has 32 bits already."""
    return x.numel() * 4 if x.element_size() < 4 else 0


def _matrix_product(call: OpCall) -> int:
    """A copy of each factor that is neither row-major nor column-major, such as an expanded
    gradient; of a batch, one matrix at a time (native/LinearAlgebra.cpp, addmm_impl_cpu_). What is
    added to the product is copied into the result before that."""
    copied_bytes = 0
    *added, first, second = (each for each in call.args if isinstance(each, torch.Tensor))
    for x in (first, second):
        (n_rows, n_columns), (row_stride, column_stride) = x.shape[-2:], x.stride()[-2:]
        by_columns = row_stride == 1 and column_stride >= max(1, n_rows)
        by_rows = column_stride == 1 and row_stride >= max(1, n_columns)
        # conjugates are computed first, except of a single transposed matrix, which BLAS can read
        if x.is_conj() and x.dim() > 2:
            copied_bytes += x.nbytes
        elif not (by_columns or by_rows) or (x.is_conj() and row_stride != 1):
            copied_bytes += n_rows * n_columns * x.element_size()
    return max(copied_bytes, *map(transposed_block_bytes, added), 0)


def _attention(call: OpCall) -> int:
    """Per thread, a tile of scores, the maxima and sums of its rows, and a tile of the output, all
    in float32; in 16 bits also the scores in 16."""
    query, key = call.inputs()[:2]
    rows, columns = _tile(query, key)
    tiles_bytes = 4 * (rows * columns + 2 * rows + rows * query.shape[-1])
    return torch.get_num_threads() * (tiles_bytes + _scores_in_16_bits(query, key))


def _attention_backward(call: OpCall) -> int:
    """Per thread, a tile of scores and one of their gradient, and the sums of its rows, in float32;
    in 16 bits also both tiles in 16. A copy of the output's gradient."""
    _, query, key = call.inputs()[:3]
    rows, columns = _tile(query, key)
    tiles_bytes = 4 * (2 * rows * columns + rows) + 2 * _scores_in_16_bits(query, key)
    return torch.get_num_threads() * tiles_bytes + query.nbytes


def _scores_in_16_bits(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes of a tile of scores in the dtype of the query; 0 if it has 32 bits."""
    return math.prod(_tile(query, key)) * 2 if query.element_size() < 4 else 0


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of scores (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    rows = 256 if n_queries >= 768 else 64 if n_queries >= 192 else 32
    return min(rows, n_queries), min(512, n_keys)


_NOT_REDUCED, _MEAN = 0, 1


def _unreduced_loss_bytes(call: OpCall) -> int:
    """The loss of every element before they are summed (ATen/native/Loss.cpp)."""
    x, target, reduction = call.args[:3] if len(call.args) > 2 else (*call.args, _MEAN)
    if reduction == _NOT_REDUCED:
        return 0
    terms: torch.Tensor = max(x, target, key=torch.Tensor.numel)
    return terms.nbytes + (mean_bytes(terms, call.outputs()[0]) if reduction == _MEAN else 0)


def _mean_of_terms(position: int) -> Callable[[OpCall], int]:
    """For losses whose result is in the storage of all terms; the reduction is at this position."""

    def estimate(call: OpCall) -> int:
        reduction = call.args[position] if len(call.args) > position else _MEAN
        return mean_bytes(call.args[0], call.outputs()[0]) if reduction == _MEAN else 0

    return estimate


def _loss_of_logits_bytes(call: OpCall) -> int:
    """The log-sigmoids, and the loss of every element, which without reduction is the output."""
    x: torch.Tensor = call.args[0]
    reduction = call.args[4] if len(call.args) > 4 else _MEAN
    if reduction == _NOT_REDUCED:
        return x.nbytes
    return 2 * x.nbytes + (mean_bytes(x, call.outputs()[0]) if reduction == _MEAN else 0)


def _scatter_reduce(call: OpCall) -> int:
    """What is scattered into, in 32 bits if it has 16. For means also the number of elements at
    each position, scattered likewise, the ones that are summed up to it, and where it is zero."""
    x, source, reduction = call.args[0], call.args[3], call.args[4]
    if reduction != "mean":
        return _float32_copy_bytes(x)
    zeros_bytes = x.numel() + number_bytes(x)
    return int(x.nbytes + source.nbytes + max(_float32_copy_bytes(x), zeros_bytes))


def _index_add(call: OpCall) -> int:
    """In 16 bits, the rows are added one by one in 32 bits; along other dimensions, all at once."""
    x, dim = call.args[:2]
    n_parts = x.shape[0] if x.dim() and dim % x.dim() == 0 else 1
    return _float32_copy_bytes(x) // max(1, n_parts)


_INDEX_BYTES = 8


def masked_rows_bytes(call: OpCall) -> int:
    """Workspace of `_safe_softmax`, which attention with dropout or a mask calls if it does not run
    as one kernel (ATen/native/transformers/attention.cpp; the same on every device).

    It takes a mask of the elements that are -inf, one of the rows that are -inf throughout, and a
    zero to fill these rows with.
    """
    x, dim = call.args[0], call.args[1]
    n_rows = x.numel() // max(1, x.shape[dim])
    masks = int(x.numel() + n_rows + call.outputs()[0].element_size())
    return max(masks, copied_bytes(x))  # the softmax's copy is freed before the masks are made


def _sort(call: OpCall) -> int:
    """Per thread, the positions of one row (ATen/native/cpu/SortingKernel.cpp)."""
    x = next(each for each in call.args if isinstance(each, torch.Tensor))
    dim = call.kwargs.get("dim", next((n for n in call.args[1:] if type(n) is int), -1))
    n_columns = x.shape[dim] if x.dim() else 1
    n_rows = x.numel() // max(1, n_columns)
    return min(torch.get_num_threads(), n_rows) * n_columns * _INDEX_BYTES


def _median(call: OpCall) -> int:
    """A copy of the input that is partitioned: for the median of all elements, or along a dimension
    that is not contiguous."""
    x: torch.Tensor = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else None
    return 0 if dim is not None and x.dim() and x.stride(dim) == 1 else x.nbytes


_LARGEST_VECTORIZED = 128
"""The largest height plus width of an output that the vectorized kernel makes; larger images are
computed channel by channel."""


def _upsample(call: OpCall) -> int:
    """Copies of input and output in the channels-last layout, for images up to a size
    (`_use_vectorized_kernel_cond_2d` of ATen/native/cpu/UpSampleKernel.cpp)."""
    x, out = call.inputs()[0], call.outputs()[0]
    if out.shape[-2] + out.shape[-1] > _LARGEST_VECTORIZED:
        return 0
    if suggested_format(x) == torch.channels_last:
        return copied_bytes(x, into=torch.channels_last)
    return x.nbytes + out.nbytes


def _trilinear(call: OpCall) -> int:
    """Workspace of nn.Bilinear, computed slice by slice along `unroll_dim` (native/Linear.cpp).

    Per slice: the product of the first two factors, already summed over those summed dimensions
    that the third factor lacks, and its product with the third factor.
    """
    *factors, first, second, third, summed = call.args[:7]
    unrolled = call.args[7] if len(call.args) > 7 else call.kwargs.get("unroll_dim", 1)
    shapes = [
        expanded_shape(x.shape, added)
        for x, added in zip(factors, (first, second, third), strict=True)
    ]
    pair_elements = all_elements = 1
    for dim, widths in enumerate(zip(*shapes, strict=True)):
        if dim == unrolled:
            continue
        pair_elements *= 1 if dim in summed and dim in third else max(widths[:2])
        all_elements *= 1 if dim in summed else max(widths)
    return int((pair_elements + all_elements) * factors[0].element_size())


def _distances(call: OpCall) -> int:
    """Workspace of Euclidean distances by a matrix product (ATen/native/Distance.cpp).

    Each row gets two more columns, its squared norm and a one, so that a product has the squared
    distances. Before that, the first rows times -2 are there with all four columns.
    """
    x, y = call.args[:2]
    n_x, n_y, width = x[..., 0].numel(), y[..., 0].numel(), x.shape[-1]
    in_product = (n_x + n_y) * (width + 2)
    before = 2 * n_x * (width + 2) + 2 * n_y - call.outputs()[0].numel()
    return int(max(in_product, before) * x.element_size())


def _distances_of_rows(call: OpCall) -> int:
    """Computed from contiguous rows: by a matrix product for many of them, or where asked for."""
    x, y, p, mode = (*call.args, None)[:4]
    is_product = mode == 1 or (not mode and max(x.shape[-2], y.shape[-2]) > 25)
    return copied_bytes(x, y) + (_distances(call) if p == 2 and is_product else 0)


def _patches_copy_bytes(call: OpCall) -> int:
    """A contiguous copy of an input that is not contiguous. If the output is larger than the input,
    also the storage first allocated for it, which was only as large as the input."""
    x: torch.Tensor = call.args[0]
    return contiguous_copy_bytes(x) + (x.nbytes if call.outputs()[0].numel() > x.numel() else 0)


def matrix_exp_bytes(call: OpCall) -> int:
    """Workspace of the matrix exponential by the Taylor polynomial of degree 18
    (ATen/native/LinearAlgebra.cpp, compute_T18); the same on every device.

    It takes ten copies (the scaled matrices, their powers, linear combinations of these); for a
    single matrix two more, a copy of it and the result. Besides, three elements per matrix: its
    norm, and twice how often it is halved. A single matrix of small norm takes less, but only its
    values tell.
    """
    x: torch.Tensor = call.args[0]
    n = x.shape[-1]
    if n < 2:
        return 0
    n_matrices = x.numel() // (n * n)
    n_copies = 10 if n_matrices > 1 else 12
    return n_copies * x.nbytes + 3 * n_matrices * x.element_size()


_ESTIMATES: Mapping[Any, Callable[[OpCall], int]] = {
    **MATRICES,
    **COPIES,
    aten.convolution: convolution,
    aten._trilinear: _trilinear,
    aten._euclidean_dist: _distances,
    aten._cdist_forward: _distances_of_rows,
    aten.linalg_matrix_exp: matrix_exp_bytes,
    aten.mse_loss: _unreduced_loss_bytes,
    aten.smooth_l1_loss: _unreduced_loss_bytes,
    aten.huber_loss: _unreduced_loss_bytes,
    aten.binary_cross_entropy: _mean_of_terms(3),
    aten.soft_margin_loss: _mean_of_terms(2),
    aten.binary_cross_entropy_with_logits: _loss_of_logits_bytes,
    # two intermediate results of the gradient's size
    aten.soft_margin_loss_backward: lambda call: 2 * call.args[1].nbytes,
    # the exponentials of the differences to the maxima
    aten.logsumexp: lambda call: call.args[0].nbytes + call.outputs()[0].nbytes,
    aten._safe_softmax: masked_rows_bytes,
    aten.im2col: _patches_copy_bytes,
    aten.col2im: _patches_copy_bytes,
    aten.sort: _sort,
    # a copy of the values, and their positions (ATen/native/Sorting.cpp)
    aten.kthvalue: lambda call: call.args[0].nbytes + call.args[0].numel() * _INDEX_BYTES,
    aten.median: _median,
    aten.nanmedian: _median,
    aten.upsample_nearest2d: _upsample,
    aten._upsample_nearest_exact2d: _upsample,
    aten.upsample_bilinear2d: _upsample,
    # the grid of each image in homogeneous coordinates: three per pixel, where the output has two
    aten.affine_grid_generator: lambda call: call.outputs()[0].nbytes // 2 * 3,
    # backward probabilities, as large as the forward ones
    aten._ctc_loss_backward: lambda call: call.args[6].nbytes,
    # the gradient's elements that the mask selects, at most all of them
    aten.masked_scatter_backward: lambda call: call.args[0].nbytes,
    aten.scatter_add: lambda call: _float32_copy_bytes(call.args[0]),
    aten.scatter_reduce: _scatter_reduce,
    aten.index_add: _index_add,
    aten.convolution_backward: convolution_backward,
    # a 16-bit input that is neither contiguous nor channels-last is computed in 32 bits first
    **dict.fromkeys(
        (aten.native_batch_norm, aten._native_batch_norm_legit_functional),
        lambda call: 0 if _is_dense(call.args[0]) else _float32_copy_bytes(call.args[0]),
    ),
    aten.native_batch_norm_backward: _batch_norm_backward,
    # two sums per channel of each image (native/cpu/group_norm_kernel.cpp)
    aten.native_group_norm_backward: lambda call: (
        2 * call.args[5] * call.args[6] * max(4, call.args[1].element_size())
    ),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _matrix_product),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _product_gradient(call: OpCall) -> int:
    """Workspace if some element is zero: the products of all other elements are then computed as
    cumulative products from both ends."""
    gradient, x = call.inputs()[:2]
    return 5 * x.nbytes + x.numel() + 4 * gradient.nbytes


def _sum_of_selected(call: OpCall) -> int:
    """The selected elements, at most all of them. With contiguous input and mask and one thread, as
    much again; else two integers per element (native/TensorAdvancedIndexing.cpp)."""
    x, mask = call.inputs()[:2]
    is_plain = x.is_contiguous() and mask.is_contiguous() and torch.get_num_threads() == 1
    return 2 * x.nbytes if is_plain else x.nbytes + 16 * x.numel()


_GRADIENT_ESTIMATES: Mapping[str, Callable[[OpCall], int]] = {
    "checkpoint_solver.prod_gradient": _product_gradient,
    "checkpoint_solver.prod_dim_gradient": _product_gradient,
    "checkpoint_solver.cumprod_gradient": lambda call: 8 * call.args[1].nbytes,
    "checkpoint_solver.sum_of_selected": _sum_of_selected,
    **{
        f"checkpoint_solver.{name}_gradient": lambda call: (
            2 * call.args[1].nbytes + call.args[1].numel()
        )
        for name in ("max", "min", "median", "nanmedian")
    },
}
"""Estimates for the operators of `graphs.capture.as_eager.gradients`, from the profiler's memory
events."""
