"""Workspace of operators on a CUDA card, from what PyTorch's kernels allocate.

Each formula names the PyTorch source file that allocates these bytes. Operators without a formula
allocate nothing besides their outputs, or an amount that only the card tells: cuDNN picks its
algorithm, and with it the workspace of a convolution, when it runs. The memory that cuBLAS keeps
between calls belongs to no operator: `graphs.training_step.device_bytes` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphs.costs.convolution_shapes import up_to_multiple
from graphs.costs.layouts import (
    arguments_at,
    copied_bytes,
    reads_contiguous,
    reads_suggested_format,
    roll_bytes,
    suggested_format,
)
from graphs.costs.operators import OpCall, aten
from graphs.costs.workspace import masked_rows_bytes, matrix_exp_bytes

_INDEX_BYTES = 8
_FLOAT_BYTES = 4


def cuda_workspace_bytes(call: OpCall) -> int:
    """Bytes that the call allocates besides inputs and outputs while it runs on a CUDA card."""
    estimate = _ESTIMATES.get(call.packet)
    return 0 if estimate is None else estimate(call)


def _attention_backward(call: OpCall) -> int:
    """The queries' gradient accumulated in float32, and one sum per query.

    Flash attention (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d)
    rounds the number of queries up to 128 and the head size to 32. With grouped queries it also
    holds gradients of keys and values for every query head (dk_expanded, dv_expanded).

    Float32 runs transformers/cuda/attention_backward.cu, which accumulates the gradient in place
    and needs only the sums (delta). cuDNN's kernel accumulates as flash attention does; what it
    allocates besides is known only on the card. The CPU's operator is covered too, since a step
    traced with fake CPU tensors shows that one.
    """
    _, query, key = call.inputs()[:3]
    n_batch, n_heads, n_queries, head_size = query.shape
    rows = n_batch * n_heads * up_to_multiple(n_queries, 128)
    row_sums_bytes = _FLOAT_BYTES * rows
    if query.dtype == torch.float32:
        return row_sums_bytes
    is_shared = key.shape[1] != n_heads
    shared = 2 * is_shared * n_batch * n_heads * key.shape[2] * head_size * query.element_size()
    return _FLOAT_BYTES * rows * up_to_multiple(head_size, 32) + row_sums_bytes + shared


_ROWS_SUMMED_TOGETHER = 10
_SORTED_ABOVE = 3072


def _embedding_backward(call: OpCall) -> int:
    """Workspace of sorting the indices and summing the gradient's rows of equal indices in float32,
    at most ten rows to a partial sum.

    Up to 3072 indices there is none (cuda/Embedding.cu). Above
    (cuda/EmbeddingBackwardKernel.cu): the sorted indices and their original positions; three arrays
    with an entry for every possible distinct index; a row and its offset for each partial sum.
    """
    gradient: torch.Tensor = call.args[0]
    n_indices: int = call.args[1].numel()
    n_rows = int(call.args[2])
    if n_indices <= _SORTED_ABOVE:
        return 0
    n_different = min(n_indices, n_rows)
    n_partial = n_indices // _ROWS_SUMMED_TOGETHER + n_different
    row_bytes = gradient.shape[-1] * max(_FLOAT_BYTES, gradient.element_size())
    return _INDEX_BYTES * (2 * n_indices + 3 * n_different + n_partial) + row_bytes * n_partial


def _group_norm_backward(call: OpCall) -> int:
    """Two sums per channel of each image (ds, db), and the coefficients of the input's gradient:
    one per channel if there is a weight (c1), two per group (c2, c3)."""
    n_images, n_channels, _, n_groups = map(int, call.args[5:9])
    n_per_channel = 2 if call.args[4] is None else 3
    return _FLOAT_BYTES * n_images * (n_per_channel * n_channels + 2 * n_groups)


_WARP = 32
_MANY_ROWS = 2**16
_MOST_BLOCKS = 2**15
_MOST_MULTIPROCESSORS = 148
"""The most of any card in `graphs.hardware`: a B200's."""


def _norm_backward(call: OpCall) -> int:
    """Contiguous copies of gradient and input if they are not contiguous (expect_contiguous), and,
    for many short rows, partial sums of the gradients of weight and bias.

    cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel, for layer norm and RMSNorm: at
    most one partial sum per 32 rows. Up to which length a row is short depends on the card's number
    of multiprocessors. The largest number is assumed here, which counts up to 8 MiB that other
    cards do not allocate.
    """
    x: torch.Tensor = call.args[1]
    width: int = math.prod(call.args[2])
    n_rows = x.numel() // max(1, width)
    copies_bytes = copied_bytes(call.args[0], x)
    if n_rows <= _MANY_ROWS or width // _WARP >= _MOST_MULTIPROCESSORS // 2:
        return copies_bytes
    n_sums = min(_MOST_BLOCKS // math.ceil(width / _WARP), math.ceil(n_rows / _WARP))
    gradients = [each for each in call.value[1:] if isinstance(each, torch.Tensor)]
    return copies_bytes + sum(int(n_sums * width) * each.element_size() for each in gradients)


def _pool_backward(*positions: int) -> Callable[[OpCall], int]:
    """Copies of the arguments at these positions, in the layout that the input's strides suggest
    (avg_pool2d_backward_out_cuda in cuda/AveragePool2d.cu,
    max_pool2d_with_indices_backward_out_cuda in cuda/DilatedMaxPool2d.cu)."""
    return lambda call: copied_bytes(
        *arguments_at(call, positions), into=suggested_format(call.args[1])
    )


def _roll(call: OpCall) -> int:
    """roll_cuda in cuda/TensorTransformations.cu, which reads a contiguous input."""
    return max(roll_bytes(call), copied_bytes(call.args[0]))


_ESTIMATES: Mapping[Any, Callable[[OpCall], int]] = {
    aten.embedding_dense_backward: _embedding_backward,
    aten._safe_softmax: masked_rows_bytes,
    aten.linalg_matrix_exp: matrix_exp_bytes,
    # a factor and an offset per channel of each image (a, b): cuda/group_norm_kernel.cu
    aten.native_group_norm: lambda call: 2 * _FLOAT_BYTES * int(call.args[3]) * int(call.args[4]),
    aten.native_group_norm_backward: _group_norm_backward,
    # contiguous input, weight and bias: layer_norm_cuda, _fused_rms_norm_cuda
    # (cuda/layer_norm_kernel.cu)
    aten.native_layer_norm: reads_contiguous(0, 2, 3),
    aten._fused_rms_norm: reads_contiguous(0, 2),
    # host_softmax, host_softmax_backward (cuda/SoftMax.cu): `.contiguous()`
    aten._softmax: reads_contiguous(0),
    aten._log_softmax: reads_contiguous(0),
    aten._softmax_backward_data: reads_contiguous(0, 1),
    aten._log_softmax_backward_data: reads_contiguous(0, 1),
    # avg_pool2d_out_cuda, max_pool2d_with_indices_out_cuda: `.contiguous(memory_format)`
    aten.avg_pool2d: reads_suggested_format,
    aten.max_pool2d_with_indices: reads_suggested_format,
    aten.avg_pool2d_backward: _pool_backward(0, 1),
    aten.max_pool2d_with_indices_backward: _pool_backward(0, 1, 7),
    aten.roll: _roll,
    aten.native_layer_norm_backward: _norm_backward,
    aten._fused_rms_norm_backward: _norm_backward,
    **{
        getattr(aten, f"_scaled_dot_product_{kind}"): _attention_backward
        for kind in (
            "flash_attention_backward",
            "cudnn_attention_backward",
            "efficient_attention_backward",
            "flash_attention_for_cpu_backward",
        )
    },
}
