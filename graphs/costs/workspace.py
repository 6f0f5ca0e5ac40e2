"""Workspace of operators on the CPU, estimated without running them.

Convolutions matter most (a tenth of a step's peak in a ResNet): oneDNN reorders tensors into blocks
of 16 channels, computes there, and reorders the result. The estimates follow its order of copies.
Compared with the profiler's memory events on an x86 machine with AVX-512 and torch 2.13
(`tests/graphs/costs/test_costs.py` repeats this), they are within a few percent of the bytes that a
float32 convolution handles. With AVX2 it takes no more, often less; with SSE alone it may take
more. Other machines choose other layouts; for exact bytes, measure. CUDA is not covered: cuDNN's
workspace depends on the algorithm it picks on the card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphs.costs.operators import OpCall, aten
from graphs.costs.promotion import promotion_bytes

_BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512 (8 with AVX2, which takes no more)."""

_WIDEST_UNROLLED = 14
"""Columns of a convolution kernel; wider ones are computed as matrix products."""


def cpu_workspace_bytes(call: OpCall) -> int:
    """Bytes that the call allocates besides inputs and outputs while it runs on the CPU."""
    estimate = _ESTIMATES.get(call.packet) or _GRADIENTS.get(str(call.packet))
    return promotion_bytes(call) if estimate is None else estimate(call)


def _blocked(tensor: torch.Tensor, *channels: int) -> int:
    """Bytes of a tensor with the dimensions `channels` padded to whole blocks."""
    shape = [
        -(-size // _BLOCK) * _BLOCK if dim in channels else size
        for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * tensor.element_size()


def _plain(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _strided(*tensors: torch.Tensor) -> int:
    """Bytes of contiguous copies of those that are not, such as a part of a concatenation.

    They exist for as long as the operator runs (ATen/native/Convolution.cpp).
    """
    return sum(0 if each.is_contiguous() else _plain(each) for each in tensors)


def _convolution(call: OpCall) -> int:
    """Reordered input and weight and the blocked result, then the result is reordered."""
    x, weight, _, stride, _, _, transposed, _, groups = call.args
    out = call.outputs()[0]
    if _keeps_channels_last(x):
        copies = 1 if _is_depthwise(weight, groups) else 2
        return copies * _blocked(weight, 0) + _of_bias(out)
    blocked = _input(x, weight, groups) + _weight(x, weight, groups) + _blocked(out, 1)
    if transposed or x.dtype != torch.float32:
        return _strided(x) + max(blocked - _plain(out), 2 * _blocked(out, 1))
    copied = _blocked(x, 1) // math.prod(stride) if math.prod(weight.shape[2:]) == 1 else 0
    subsampled = copied if any(step > 1 for step in stride) else 0
    return _strided(x) + max(blocked + subsampled - _plain(out), _blocked(out, 1))


def _convolution_backward(call: OpCall) -> int:
    """First the gradient of the input, then that of the weight, beside it."""
    gradient, x, weight, _, stride, *_, groups, mask = call.args
    if _keeps_channels_last(x):
        is_copied = not gradient.is_contiguous(memory_format=torch.channels_last)
        copied = _plain(gradient) if is_copied else 0
        return copied + _in_channels_last(weight, groups) + _of_bias(gradient)
    of_x, of_weight = (_plain(x) if mask[0] else 0), (_plain(weight) if mask[1] else 0)
    without_x = _blocked(gradient, 1) + _weight(x, weight, groups)
    peaks = [0]
    if mask[0]:
        peaks.append(_blocked(x, 1) + max(without_x, of_x))
        if any(step > 1 for step in stride):
            peaks.append(3 * _blocked(x, 1))
    if mask[1] and groups == 1 and weight.shape[-1] > _WIDEST_UNROLLED:
        peaks.append(of_x + of_weight + _by_matrix_products(weight, gradient))
    elif mask[1]:
        blocked = _input(x, weight, groups) + without_x
        peaks.append(of_x + max(blocked, _weight(x, weight, groups) + of_weight))
    return _strided(gradient, x) + max(0, max(peaks) - of_x - of_weight)


def _by_matrix_products(weight: torch.Tensor, gradient: torch.Tensor) -> int:
    """Workspace of a wide kernel's gradient (the patches of a ViT): per thread, four copies of the
    weight and the patches of one image."""
    patches = math.prod(weight.shape[1:]) * math.prod(gradient.shape[2:]) * weight.element_size()
    return torch.get_num_threads() * (4 * _plain(weight) + patches) + 256


def _input(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered input, if it is reordered."""
    return 0 if _is_read_in_place(x, weight, groups) else _blocked(x, 1)


def _weight(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered weight."""
    if groups != 1:
        return _plain(weight)
    return _blocked(weight, 0) if _is_read_in_place(x, weight, groups) else _blocked(weight, 0, 1)


def _is_read_in_place(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Inputs of few channels, such as images, are not reordered."""
    return x.shape[1] < _BLOCK and groups == 1 and math.prod(weight.shape[2:]) > 1


def _keeps_channels_last(x: torch.Tensor) -> bool:
    """Convolutions of channels-last inputs stay in that layout.

    An image of one pixel is contiguous in every layout; its strides decide.
    """
    return (
        x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.stride(1) == 1
        and x.stride(3) == x.shape[1] > 1
    )


def _is_depthwise(weight: torch.Tensor, groups: int) -> bool:
    return groups == weight.shape[0] and weight.shape[1] == 1


def _in_channels_last(weight: torch.Tensor, groups: int) -> int:
    """Workspace of the weight's gradient in the channels-last layout.

    Depthwise kernels larger than 3 x 3 (ConvNeXt's) are summed in 256 partial results, whatever
    the number of threads.
    """
    if not _is_depthwise(weight, groups):
        return 3 * _blocked(weight, 0)
    return 2 * _blocked(weight, 0) if math.prod(weight.shape[2:]) <= 9 else 257 * _plain(weight)


def _of_bias(out: torch.Tensor) -> int:
    return out.shape[1] * out.element_size()


def _is_dense(*tensors: torch.Tensor) -> bool:
    """Whether all are contiguous, or all in the channels-last layout."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return any(all(t.is_contiguous(memory_format=each) for t in tensors) for each in formats)


def _batch_norm(call: OpCall) -> int:
    """In 16 bits, an input that is in neither layout is computed in 32 bits first."""
    x: torch.Tensor = call.args[0]
    return 0 if _is_dense(x) else _in_32_bits(x)


def _batch_norm_backward(call: OpCall) -> int:
    """As much as the input's gradient where gradient and input have the same layout; else a number
    for each channel, and in 16 bits the gradient in 32 bits, of which kernels for some pairs of
    layouts take none (native/Normalization.cpp)."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    if _is_dense(gradient, x):
        return _plain(x) if call.args[-1][0] else 0
    return x.shape[1] * x.element_size() + _in_32_bits(x)


def _in_32_bits(x: torch.Tensor) -> int:
    return x.numel() * 4 if x.element_size() < 4 else 0


def _group_norm_backward(call: OpCall) -> int:
    """Two sums for each channel of each image (native/cpu/group_norm_kernel.cpp)."""
    x, n_images, n_channels = call.args[1], call.args[5], call.args[6]
    return int(2 * n_images * n_channels * max(4, x.element_size()))


def _matrix_product(call: OpCall) -> int:
    """A copy of each matrix whose rows or columns do not lie side by side, such as an expanded
    gradient; of a batch one at a time (native/LinearAlgebra.cpp, addmm_impl_cpu_)."""
    matrices = [each for each in call.args if isinstance(each, torch.Tensor)][-2:]
    return sum(
        0 if _is_for_blas(*each.shape[-2:], *each.stride()[-2:]) else _plain_matrix(each)
        for each in matrices
    )


def _is_for_blas(n_rows: int, n_columns: int, row_stride: int, column_stride: int) -> bool:
    by_columns = row_stride == 1 and column_stride >= max(1, n_rows)
    return by_columns or (column_stride == 1 and row_stride >= max(1, n_columns))


def _plain_matrix(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[-2:]) * tensor.element_size()


def _attention(call: OpCall) -> int:
    """Per thread, a tile of scores, the maxima and sums of its rows, and a tile of the output."""
    query: torch.Tensor = call.args[0]
    key: torch.Tensor = call.args[1]
    rows, columns = _tile(query, key)
    return torch.get_num_threads() * 4 * (rows * columns + 2 * rows + rows * query.shape[-1])


def _attention_backward(call: OpCall) -> int:
    """Per thread, a tile of scores and one of their gradient; a copy of the output's gradient."""
    query: torch.Tensor = call.args[1]
    key: torch.Tensor = call.args[2]
    rows, columns = _tile(query, key)
    return torch.get_num_threads() * 4 * 2 * rows * columns + _plain(query)


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of scores (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    rows = 256 if n_queries >= 768 else 64 if n_queries >= 192 else 32
    return min(rows, n_queries), min(512, n_keys)


_NOT_REDUCED = 0


def _reduced_loss(call: OpCall) -> int:
    """All terms, which are then summed up (ATen/native/Loss.cpp)."""
    x, target, reduction = call.args[:3] if len(call.args) > 2 else (*call.args, 1)
    return 0 if reduction == _NOT_REDUCED else max(_plain(x), _plain(target))


def _loss_with_logits(call: OpCall) -> int:
    """Log-sigmoid beside the terms, which are the result where they are not reduced."""
    reduction = call.args[4] if len(call.args) > 4 else 1
    return _plain(call.args[0]) * (1 if reduction == _NOT_REDUCED else 2)


_INDEX_BYTES = 8


def masked_rows_bytes(call: OpCall) -> int:
    """Which numbers are -inf, which rows are so throughout, and a zero for those
    (ATen/native/transformers/attention.cpp, _safe_softmax, on every device): of attention with
    dropout or a mask, where it is not one kernel."""
    x, dim = call.args[0], call.args[1]
    n_rows = x.numel() // max(1, x.shape[dim])
    return int(x.numel() + n_rows + call.outputs()[0].element_size())


def _sort(call: OpCall) -> int:
    """Per thread, the positions of one row (ATen/native/cpu/SortingKernel.cpp)."""
    x = next(each for each in call.args if isinstance(each, torch.Tensor))
    dim = call.kwargs.get("dim", next((n for n in call.args[1:] if type(n) is int), -1))
    n_columns = x.shape[dim] if x.dim() else 1
    n_rows = x.numel() // max(1, n_columns)
    return min(torch.get_num_threads(), n_rows) * n_columns * _INDEX_BYTES


def _median(call: OpCall) -> int:
    """A copy that is partitioned: of all values, or where they do not lie side by side."""
    x: torch.Tensor = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else None
    return 0 if dim is not None and x.dim() and x.stride(dim) == 1 else _plain(x)


_LARGEST_VECTORIZED = 128
"""Height and width, added up, of images that are made channel by channel beyond."""


def _upsample(call: OpCall) -> int:
    """Input and output in the channels-last layout, up to a size
    (`_use_vectorized_kernel_cond_2d` of ATen/native/cpu/UpSampleKernel.cpp)."""
    x, out = call.args[0], call.outputs()[0]
    is_small = out.shape[-2] + out.shape[-1] <= _LARGEST_VECTORIZED
    return _plain(x) + _plain(out) if is_small and not _keeps_channels_last(x) else 0


def _scatter_reduce(call: OpCall) -> int:
    """For means, the number of elements at each place, and what is added up to it."""
    x, source = call.inputs()[0], call.inputs()[-1]
    return _plain(x) + _plain(source) + source.numel() if call.args[4] == "mean" else 0


def _trilinear(call: OpCall) -> int:
    """One slice after the other: the product of two factors, summed up where the third has no such
    dimension, and its product with the third (native/Linear.cpp)."""
    *factors, first, second, third, summed = call.args[:7]
    unrolled = call.args[7] if len(call.args) > 7 else call.kwargs.get("unroll_dim", 1)
    missing = first, second, third
    shapes = [_with_ones(x.shape, each) for x, each in zip(factors, missing, strict=True)]
    of_two = of_all = 1
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if dim == unrolled:
            continue
        of_two *= 1 if dim in summed and dim in third else max(sizes[:2])
        of_all *= 1 if dim in summed else max(sizes)
    return int((of_two + of_all) * factors[0].element_size())


def _with_ones(shape: Sequence[int], missing: Sequence[int]) -> Iterator[int]:
    """The sizes, and one where a dimension is missing."""
    sizes = iter(shape)
    for dim in range(len(shape) + len(missing)):
        yield 1 if dim in missing else next(sizes)


_ESTIMATES: Mapping[Any, Callable[[OpCall], int]] = {
    aten.convolution: _convolution,
    aten._trilinear: _trilinear,
    aten.mse_loss: _reduced_loss,
    aten.smooth_l1_loss: _reduced_loss,
    aten.huber_loss: _reduced_loss,
    aten.binary_cross_entropy_with_logits: _loss_with_logits,
    # two intermediate results of the gradient's size
    aten.soft_margin_loss_backward: lambda call: 2 * _plain(call.args[1]),
    # the exponentials of the differences to the maxima
    aten.logsumexp: lambda call: _plain(call.args[0]) + _plain(call.outputs()[0]),
    aten._safe_softmax: masked_rows_bytes,
    aten.sort: _sort,
    # a copy of the values, and their positions (ATen/native/Sorting.cpp)
    aten.kthvalue: lambda call: _plain(call.args[0]) + call.args[0].numel() * _INDEX_BYTES,
    aten.median: _median,
    aten.nanmedian: _median,
    aten.upsample_nearest2d: _upsample,
    aten._upsample_nearest_exact2d: _upsample,
    aten.upsample_bilinear2d: _upsample,
    # the grid of each image in homogeneous coordinates: three numbers for two
    aten.affine_grid_generator: lambda call: _plain(call.outputs()[0]) // 2 * 3,
    # backward probabilities, as large as the forward ones
    aten._ctc_loss_backward: lambda call: _plain(call.args[6]),
    # the gradient's elements that the mask selects, at most all of them
    aten.masked_scatter_backward: lambda call: _plain(call.args[0]),
    aten.scatter_reduce: _scatter_reduce,
    aten.convolution_backward: _convolution_backward,
    **dict.fromkeys(
        (aten.native_batch_norm, aten._native_batch_norm_legit_functional), _batch_norm
    ),
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.native_group_norm_backward: _group_norm_backward,
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _matrix_product),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _product_gradient(call: OpCall) -> int:
    """With zeros: products of the other factors, from both sides."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    return 5 * _plain(x) + x.numel() + 4 * _plain(gradient)


def _sum_of_selected(call: OpCall) -> int:
    """What is selected, at most all; besides, of a mask that is not contiguous and with several
    threads, two integers for each element (native/TensorAdvancedIndexing.cpp)."""
    x: torch.Tensor = call.args[0]
    mask: torch.Tensor = call.args[1]
    is_plain = x.is_contiguous() and mask.is_contiguous() and torch.get_num_threads() == 1
    return 2 * _plain(x) if is_plain else _plain(x) + 16 * x.numel()


_GRADIENTS: Mapping[str, Callable[[OpCall], int]] = {
    "checkpoint_solver.prod_gradient": _product_gradient,
    "checkpoint_solver.prod_dim_gradient": _product_gradient,
    "checkpoint_solver.cumprod_gradient": lambda call: 8 * _plain(call.args[1]),
    "checkpoint_solver.sum_of_selected": _sum_of_selected,
    **{
        f"checkpoint_solver.{name}_gradient": lambda call: (
            2 * _plain(call.args[1]) + call.args[1].numel()
        )
        for name in ("max", "min", "median", "nanmedian")
    },
}
"""Of `graphs.capture.as_eager.gradients`; as the profiler shows them."""
