"""Which convolutions with strides have their input's gradient computed phase by phase on the CPU,
and what that takes.

A stride of 2 x 2 has four phases: the input pixels that meet the same part of the kernel. oneDNN
computes them one after the other ("brgconv_strided"), with the channels last whatever the layout
that PyTorch asks for. The conditions follow `init_jcp` in oneDNN's jit_brgemm_conv_bwd_utils; sizes
were measured with torch 2.13 and AVX-512: 1 to 256 channels, 1 to 64 groups, strides to 4, kernels
to 7, images of 4 to 112 pixels a side, 1 to 4 threads. Returned values are bytes.
"""

from __future__ import annotations

import math

from graphs.costs.convolution_shapes import (
    BLOCK,
    Convolution,
    has_avx512,
    n_threads,
    up_to_multiple,
)

_PAGE = 4096
"""What buffers are rounded up to: elements or bytes, as oneDNN counts each."""


_WIDEST = 28
"""The most columns that a kernel which is computed directly has in registers at a time."""


def is_computed_by_phases(conv: Convolution) -> bool:
    """Whether this backward call (not transposed) computes the input's gradient by phases.

    It does with strides and without gaps; groups of up to 16 output channels are computed directly
    if their channels fill blocks of four (of up to 8 if not, or without AVX-512), and others of up
    to 8 as matrix products.
    """
    if not conv.is_strided:
        return False
    if conv.groups == 1 or not conv.is_float32:
        return not is_strided_with_gaps(conv)
    is_direct = conv.fills_blocks(4) and has_avx512() and columns_fit(conv)
    widest = BLOCK if is_direct else BLOCK // 2
    return conv.group_channels[1] > widest and not conv.has_gaps


def is_strided_with_gaps(conv: Convolution) -> bool:
    """Whether the kernel has both a stride and gaps, for which the input's gradient is computed as
    matrix products."""
    is_dense_1x1 = conv.groups == 1 and conv.is_1x1
    return conv.is_strided and conv.has_gaps and conv.is_float32 and not is_dense_1x1


def columns_fit(conv: Convolution) -> bool:
    """Whether the columns of the images fit the direct computation of the input's gradient with a
    stride: those beyond 28 in whole strides, and without a rest that the kernel does not meet
    (`init_conf` of jit_avx512_common_conv_kernel). With the stride in the columns alone it has
    fewer at a time, 6 to 28; then this is whether all of these fit."""
    n_columns, kernel = conv.x.shape[-1], conv.kernel[-1]
    stride, padding = conv.stride[-1], conv.padding[-1]
    end_padding = (conv.out.shape[-1] - 1) * stride + kernel - n_columns - padding
    has_strided_rows = any(step > 1 for step in conv.stride[:-1])
    for most in (_WIDEST,) if has_strided_rows else (_WIDEST, 15, 10, 7, 6):
        width = min(most, n_columns)
        rest = end_padding + n_columns % width
        margins = [max(0, kernel - 1 - pad) // stride for pad in (padding, max(0, rest))]
        if max(margins) * stride > width:
            return False
        if n_columns > width and (width % stride or rest < 0):
            return False
    return True


def peak_by_phases(conv: Convolution) -> int:
    """Bytes at the peak of computing the gradient of the input by phases, including that gradient:
    three copies of it (in channels last, and twice in order), or one beside the reordered gradient
    of the output, the reordered weight and the scratch memory."""
    x_bytes, n_in = conv.x.nbytes, conv.weight.shape[1]
    weight_bytes = conv.weight.nbytes // max(1, n_in) * _padded_channels(conv)
    reordered_bytes = conv.out.nbytes + weight_bytes + _scratch_bytes(conv)
    return x_bytes + max(2 * x_bytes, reordered_bytes)


def _padded_channels(conv: Convolution) -> int:
    """The number of input channels of a group, padded to whole blocks. An upper bound: oneDNN
    chooses blocks of 16 to 64 channels (8 to 32 in groups of up to 16 output channels, or without
    AVX-512), those of 48 if they pad little."""
    n_in, n_out = conv.group_channels
    is_wide = has_avx512() and (conv.groups == 1 or n_out > BLOCK)
    block = BLOCK if is_wide else BLOCK // 2
    if n_in <= 2 * BLOCK:
        return up_to_multiple(n_in, block)
    padded, otherwise = up_to_multiple(n_in, 2 * BLOCK), up_to_multiple(n_in, 3 * block)
    return padded if is_wide and otherwise > n_in * 17 / 16 else max(padded, otherwise)


def _scratch_bytes(conv: Convolution) -> int:
    """Scratch memory: per thread, one image of the output's gradient with the margins that the
    phases of the kernel read, one byte for each row of each group, and a row of the input's
    gradient if the stride does not divide its columns."""
    gradient, x = conv.out, conv.x
    n_pixels = 1
    for n_out, n_in, kernel, step, pad in zip(
        gradient.shape[2:], x.shape[2:], conv.kernel, conv.stride, conv.padding, strict=True
    ):
        end_pad = (n_out - 1) * step + kernel - n_in - pad
        margins = [max(0, kernel - 1 - each) // step for each in (pad, end_pad)]
        n_pixels *= n_out + sum(margins)
    n_elements = up_to_multiple(n_pixels * gradient.shape[1], _PAGE)
    n_columns, step = x.shape[-1], conv.stride[-1]
    is_uneven = n_columns % step != 0
    if is_uneven:
        row = up_to_multiple(n_columns, step) * step * x.shape[1]
        n_elements += up_to_multiple(row, _PAGE)
    mask_bytes = up_to_multiple(conv.groups * math.prod(x.shape[2:-1]), _PAGE)
    thread_bytes = _PAGE + n_elements * x.element_size() + mask_bytes + 24
    return n_threads() * thread_bytes + (3 + is_uneven) * _PAGE
