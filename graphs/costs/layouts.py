"""Workspace of CPU kernels that first copy their inputs into the layout that they read.

Most kernels read any strides. Those listed here do not: they copy permuted, sliced or expanded
inputs. Which kernels copy, and into which layout, was measured with torch 2.13: tensors of 1 to 5
dimensions in 13 layouts (contiguous and channels-last, both also transposed, rotated, sliced and
expanded), gradients and inputs in all pairs of layouts, in float32 and bfloat16.
`tests/graphs/costs/test_layouts.py` repeats this. Which CUDA kernels copy is in
`graphs.costs.cuda_workspace`, from their source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphs.costs.operators import OpCall, aten

TRANSPOSED_BLOCK = 60 * 60
"""Elements of the buffer through which PyTorch copies a transposed matrix (native/Copy.cpp)."""


def suggested_format(x: torch.Tensor) -> torch.memory_format:
    """The layout that PyTorch infers from the strides (`suggest_memory_format` of
    c10/core/TensorImpl.h): channels-last or contiguous.

    Only the order of the strides decides, so a slice of the channels of a channels-last tensor is
    channels-last too.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last is None or x.stride(1) == 0:
        return torch.contiguous_format
    least_stride = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        # with one channel and one pixel the strides do not tell the layout: take it as contiguous
        is_ambiguous = dim == 0 and least_stride == x.stride(1)
        if x.shape[dim] == 0 or x.stride(dim) < least_stride or is_ambiguous:
            return torch.contiguous_format
        least_stride = x.stride(dim) * max(1, x.shape[dim])
    return channels_last


def copied_bytes(
    *tensors: torch.Tensor | None, into: torch.memory_format = torch.contiguous_format
) -> int:
    """Bytes of the copies of the tensors that are not contiguous in the layout `into`."""
    to_copy = [x for x in tensors if x is not None and not x.is_contiguous(memory_format=into)]
    return sum(x.nbytes + transposed_block_bytes(x) for x in to_copy)


def transposed_block_bytes(x: torch.Tensor) -> int:
    """Bytes of the buffer for copying `x` into a contiguous tensor of its dtype: 0 unless it is a
    transposed matrix."""
    is_transposed = x.dim() == 2 and x.stride() == (1, x.shape[0]) and not x.is_conj()
    is_large = x.numel() >= TRANSPOSED_BLOCK
    return TRANSPOSED_BLOCK * x.element_size() if is_transposed and is_large else 0


def _copies_argument(position: int, *, into_part: bool = False) -> Callable[[OpCall], int]:
    """An estimate for operators that copy the argument at this position into their result.

    into_part: into a part of it along the dimension that is argument 2. Only along the first one is
        the part contiguous.
    """

    def estimate(call: OpCall) -> int:
        x, out = call.args[position], call.outputs()[0]
        if not out.is_contiguous() or out.dtype != x.dtype:
            return 0
        dim = call.args[2] if into_part and len(call.args) > 2 else 0
        return transposed_block_bytes(x) if dim % max(1, out.dim()) == 0 else 0

    return estimate


def reads_contiguous(*positions: int) -> Callable[[OpCall], int]:
    """An estimate for kernels that read the arguments at these positions in the contiguous
    layout."""
    return lambda call: copied_bytes(*arguments_at(call, positions))


def reads_suggested_format(call: OpCall) -> int:
    """For kernels that read the input in the layout that its strides suggest."""
    x: torch.Tensor = call.args[0]
    return copied_bytes(x, into=suggested_format(x))


def _reads_gradient_format(*positions: int) -> Callable[[OpCall], int]:
    """An estimate for kernels that use the layout of the gradient, argument 0: they copy the
    arguments at these positions into it, and at the end the result if its layout is another."""

    def estimate(call: OpCall) -> int:
        layout = suggested_format(call.args[0])
        return copied_bytes(*arguments_at(call, positions), call.outputs()[0], into=layout)

    return estimate


def arguments_at(call: OpCall, positions: tuple[int, ...]) -> list[torch.Tensor | None]:
    """The call's arguments at these positions, without those that were left out."""
    return [call.args[at] for at in positions if at < len(call.args)]


def _layer_norm_backward(call: OpCall) -> int:
    """Copies of gradient, input and weight; each thread's own sums of the parameters' gradients
    (native/cpu/layer_norm_kernel.cpp)."""
    gradient, x, shape = call.args[:3]
    width = torch.Size(shape).numel()
    sums = 2 * torch.get_num_threads() * width * x.element_size() if any(call.args[7][1:]) else 0
    return copied_bytes(gradient, x, call.args[5]) + sums


def _adaptive_max_pool_backward(call: OpCall) -> int:
    gradient, x, indices = call.args
    return copied_bytes(gradient, indices, into=suggested_format(x))


def roll_bytes(call: OpCall) -> int:
    """PyTorch rolls one dimension after the other (native/TensorTransformations.cpp, roll_common)
    and holds all intermediate results until the end. Without dimensions, it copies an input that is
    not contiguous."""
    x: torch.Tensor = call.args[0]
    n_shifts = len(call.args[1])
    dims = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", ())
    if not dims:
        return copied_bytes(x)
    return (n_shifts - 1) * x.numel() * x.element_size()


def _index_select(call: OpCall) -> int:
    """A contiguous copy of the input, only if rows are selected along the second dimension
    (index_select_out_cpu_dim1_)."""
    x, dim = call.args[:2]
    return copied_bytes(x) if x.dim() > 1 and dim % x.dim() == 1 else 0


_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _gelu_backward(call: OpCall) -> int:
    """A contiguous input selects oneDNN's kernel, which reads a contiguous gradient and writes a
    contiguous result."""
    gradient, x = call.args[:2]
    is_exact = call.kwargs.get("approximate", "none") == "none"
    if not (is_exact and x.is_contiguous() and x.dtype in _ONEDNN_DTYPES):
        return 0
    return copied_bytes(gradient, call.outputs()[0])


_CONTIGUOUS_RESULT = (aten.upsample_nearest3d_backward, aten._upsample_nearest_exact3d_backward)
"""These compute a contiguous result, and copy it if the output is not contiguous."""


def _upsample_backward(call: OpCall) -> int:
    """Contiguous and channels-last gradients are read in place. Others are copied, and so is a
    result whose layout is channels-last, as such a gradient's strides may suggest."""
    gradient: torch.Tensor = call.args[0]
    out = call.outputs()[0]
    layout = suggested_format(gradient)
    if gradient.is_contiguous(memory_format=layout):
        return copied_bytes(out) if call.packet in _CONTIGUOUS_RESULT else 0
    return copied_bytes(gradient, out)


COPIES: Mapping[Any, Callable[[OpCall], int]] = {
    aten.clone: _copies_argument(0),
    aten.copy: _copies_argument(1),
    aten.copy_: _copies_argument(1),
    aten.slice_backward: _copies_argument(0, into_part=True),
    aten.select_backward: _copies_argument(0, into_part=True),
    aten.slice_scatter: _copies_argument(1, into_part=True),
    aten.select_scatter: _copies_argument(1, into_part=True),
    **dict.fromkeys(
        (
            *(aten._softmax, aten._log_softmax, aten.avg_pool3d, aten.fractional_max_pool2d),
            *(aten.reflection_pad1d, aten.replication_pad1d),
            *(aten.reflection_pad1d_backward, aten.replication_pad1d_backward),
            *(aten.avg_pool3d_backward, aten._adaptive_avg_pool3d_backward),
            *(aten.upsample_nearest1d_backward, aten._upsample_nearest_exact1d_backward),
            *(aten.upsample_linear1d_backward, aten.upsample_bicubic2d_backward),
            *(aten.embedding_dense_backward, aten.grid_sampler_2d_backward),
        ),
        reads_contiguous(0),
    ),
    **dict.fromkeys(
        (
            *(aten._softmax_backward_data, aten._log_softmax_backward_data),
            *(aten.nll_loss_forward, aten.nll_loss2d_forward),
        ),
        reads_contiguous(0, 1),
    ),
    aten.native_layer_norm: reads_contiguous(0, 2, 3),
    aten.native_layer_norm_backward: _layer_norm_backward,
    **dict.fromkeys(
        (
            *(aten.avg_pool2d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices),
            *(aten._adaptive_avg_pool2d, aten.adaptive_max_pool2d),
            *(aten.pixel_shuffle, aten.pixel_unshuffle),
            *(aten.channel_shuffle, aten.native_channel_shuffle),
            *(aten.reflection_pad2d, aten.reflection_pad3d),
            *(aten.replication_pad2d, aten.replication_pad3d),
        ),
        reads_suggested_format,
    ),
    **dict.fromkeys(
        (
            *(aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward),
            *(aten.reflection_pad2d_backward, aten.reflection_pad3d_backward),
            *(aten.replication_pad2d_backward, aten.replication_pad3d_backward),
        ),
        _reads_gradient_format(0),
    ),
    **dict.fromkeys(
        (aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward),
        _reads_gradient_format(0, 7),
    ),
    aten.adaptive_max_pool2d_backward: _adaptive_max_pool_backward,
    **dict.fromkeys(
        (
            *(aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward),
            *(aten.upsample_nearest3d_backward, aten._upsample_nearest_exact3d_backward),
            *(aten.upsample_bilinear2d_backward, aten.upsample_trilinear3d_backward),
        ),
        _upsample_backward,
    ),
    aten.roll: roll_bytes,
    aten.index_select: _index_select,
    aten.gelu_backward: _gelu_backward,
}
