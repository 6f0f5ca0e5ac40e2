"""Workspace of convolutions in the channels-last layout on the CPU.

In this layout oneDNN reads the images in place and reorders only the weight into blocks of
channels. What it allocates was measured with torch 2.13 and AVX-512: dense and grouped convolutions
of 1 to 320 channels, 1 to 40 per group, kernels of 1 to 7, strides to 4, dilations to 4, images of
1 to 28 pixels a side, 1 and 2 threads. `tests/graphs/costs/test_convolution_layouts.py` repeats a
part of this; without AVX-512 (AVX2), its cases are all that was measured. The returned values are
bytes.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from graphs.costs.convolution_shapes import (
    BLOCK,
    Convolution,
    has_avx512,
    n_threads,
    up_to_multiple,
)
from graphs.costs.layouts import copied_bytes, suggested_format

_CHANNELS_LAST = torch.channels_last

_STRIDED_1X1_BYTES = 4096
"""Upper bound on what 1 x 1 kernels with a stride above 1 allocate besides."""


def is_in_channels_last(conv: Convolution) -> bool:
    """Whether the input's or the weight's strides are channels-last, which is when PyTorch
    convolves in this layout (`mkldnn_conv_use_channels_last` of ATen/native/ConvUtils.h). A 1 x 1
    weight with its default strides does not count, although both layouts have the same bytes."""
    formats = suggested_format(conv.x), suggested_format(conv.weight)
    return conv.x.dim() == 4 and _CHANNELS_LAST in formats


def channels_last_convolution(conv: Convolution) -> int:
    """Workspace of the forward operator. A transposed convolution computes what the input's
    gradient of an ordinary one computes."""
    out = conv.out
    copied = copied_bytes(conv.x, conv.weight, into=_CHANNELS_LAST)
    copied += int(out.shape[1]) * out.element_size()
    if conv.transposed:
        image_bytes = out.nbytes if conv.is_1x1 else 0
        ordinary = dataclasses.replace(conv, x=out, out=conv.x)
        return copied + max(image_bytes, _input_gradient_workspace(ordinary))
    all_patches_bytes = conv.patches_bytes if conv.is_without_onednn() else 0
    return copied + max(all_patches_bytes, _output_workspace(conv))


def _output_workspace(conv: Convolution) -> int:
    """Workspace of computing the output, without copies of inputs that are in another layout."""
    n_in, n_out = conv.group_channels
    is_grouped = conv.groups > 1
    if conv.is_1x1 and is_grouped:
        return conv.out.nbytes
    if conv.is_depthwise:
        return _depthwise_block_bytes(conv) + 256  # the 256: dilated kernels, on small images
    if _is_matrix_product(conv):
        return 0
    if is_grouped and has_avx512() and n_in < BLOCK and n_in % 4 == 0 and n_out in (4, 8):
        return conv.weight.nbytes  # a block has as many channels as a group, so no padding
    if is_grouped and has_avx512() and n_in <= BLOCK:
        return _blocked_bytes(conv)
    return n_in * _padded_channels(n_out) * conv.groups * conv.kernel_bytes + _scratch_bytes()


def channels_last_convolution_backward(conv: Convolution) -> int:
    """Workspace of the backward operator, which computes the input's gradient, then the weight's.

    The larger of both counts, with the copies that exist throughout.
    """
    gradient = conv.out
    bias_bytes = int(gradient.shape[1]) * gradient.element_size()
    copies_bytes = copied_bytes(gradient, conv.x, into=_CHANNELS_LAST) + bias_bytes
    reordered = copied_bytes(conv.weight, into=_CHANNELS_LAST)
    peaks = [0]
    if conv.mask[0]:
        peaks.append(reordered + _input_gradient_workspace(conv))
    if conv.mask[1]:
        peaks.append(reordered + _weight_gradient_workspace(conv))
    if conv.is_without_onednn():
        peaks.append(reordered + conv.patches_bytes)
    return copies_bytes + max(peaks)


def _input_gradient_workspace(conv: Convolution) -> int:
    """Workspace of computing the gradient of the input."""
    n_in, n_out = conv.group_channels
    if conv.is_1x1 and conv.groups > 1:
        return conv.x.nbytes + conv.weight.nbytes
    if conv.is_depthwise:
        if conv.has_gaps and conv.is_strided:  # computed as matrix products, per thread
            thread_bytes = conv.patches_bytes + _image_bytes(conv)
            return _depthwise_block_bytes(conv) + n_threads() * thread_bytes + 256
        return _blocked_bytes(conv) if conv.has_gaps else _depthwise_block_bytes(conv)
    if _is_matrix_product(conv):
        return 0
    if conv.groups > 1 and has_avx512() and n_out <= BLOCK:
        return _blocked_bytes(conv)
    scratch = max(_strided_scratch_bytes(conv), _scratch_bytes() + 128)
    return _padded_channels(n_in) * n_out * conv.groups * conv.kernel_bytes + scratch


def _strided_scratch_bytes(conv: Convolution) -> int:
    """Scratch memory of the input's gradient for strides above 1: per thread, one image of the
    gradient with the margin that a phase of the kernel needs (a stride of 2 x 2 has 4 phases). An
    upper bound: measured with 8 to 256 channels, strides to 4, kernels to 7, 10 to 112 pixels a
    side."""
    n_phases = math.prod(conv.stride)
    if n_phases == 1:
        return 0
    sides = zip(conv.out.shape[2:], conv.kernel, conv.stride, strict=True)
    n_pixels = math.prod(
        size + (kernel - 1 if step % 2 else -(-kernel // step)) for size, kernel, step in sides
    )
    n_channels = max(64, conv.group_channels[1])
    image_bytes = max(128, -(-n_pixels // 64) * 64) * n_channels * conv.out.element_size()
    thread_bytes = 8216 + (image_bytes if conv.groups == 1 else 2 * image_bytes + 8192)
    return 2048 * (n_phases - 1) * (n_threads() + 1) + n_threads() * thread_bytes


def _weight_gradient_workspace(conv: Convolution) -> int:
    """Workspace of computing the weight's gradient: a copy of the weight beside the sums in blocks
    of 16 x 16 channels.

    Every group has its own block, even a group of one channel. So depthwise kernels that are not
    computed directly, such as ConvNeXt's 7 x 7, take 257 times the weight: 256 for the block and
    one for the copy. Without AVX-512 the blocks are of 8 x 8 channels, and kernels that have gaps,
    or more rows than the image, are computed as matrix products.
    """
    weight, groups = conv.weight, conv.groups
    if conv.is_1x1 and groups > 1:
        return (conv.x.nbytes + conv.out.nbytes) // groups + weight.nbytes
    if conv.is_depthwise and conv.computes_depthwise_directly():
        return 2 * _depthwise_block_bytes(conv)
    if _is_matrix_product(conv):
        return 0
    matrix_product_bytes = conv.matrix_bytes + n_threads() * _image_bytes(conv) + 128
    if conv.is_depthwise and conv.has_gaps and conv.is_strided:
        return matrix_product_bytes
    if conv.is_depthwise and not has_avx512():
        is_tall = conv.kernel[0] > conv.x.shape[2]
        return matrix_product_bytes if conv.has_gaps or is_tall else (1 + 8 * 8) * weight.nbytes
    is_blocked = conv.is_depthwise or conv.computes_in_blocks()
    if groups == 1 and not is_blocked:
        return matrix_product_bytes
    if groups == 1 and weight.shape[1] < BLOCK:
        block_bytes = weight.shape[1] * up_to_multiple(weight.shape[0], BLOCK) * conv.kernel_bytes
    else:
        block_bytes = _blocked_bytes(conv)
    block_bytes += weight.nbytes + (_STRIDED_1X1_BYTES if conv.is_1x1 else 0)
    if conv.is_depthwise and 1 in conv.kernel:  # the kernel is a row or a column
        block_bytes += weight.nbytes + 128
    return block_bytes if is_blocked else max(block_bytes, matrix_product_bytes)


def _is_matrix_product(conv: Convolution) -> bool:
    """Whether this is a 1 x 1 convolution in float32 with stride 1: a matrix product, which copies
    nothing if it is dense."""
    return conv.is_float32 and conv.is_1x1 and not conv.is_strided


def _image_bytes(conv: Convolution) -> int:
    """Bytes of one group of one image of the input."""
    return conv.x.nbytes // max(1, conv.x.shape[0] * conv.groups)


def _blocked_bytes(conv: Convolution) -> int:
    """Bytes of the weight with each group's channels, in and out, padded to blocks of 16."""
    n_in, n_out = (up_to_multiple(n, BLOCK) for n in conv.group_channels)
    return conv.groups * n_in * n_out * conv.kernel_bytes


def _depthwise_block_bytes(conv: Convolution) -> int:
    """Bytes of a depthwise weight in blocks of 16 groups each."""
    return up_to_multiple(conv.weight.shape[0], BLOCK) * conv.kernel_bytes


def _padded_channels(n_channels: int) -> int:
    """The number of channels padded to blocks of 64 or 32, whichever pad least. Some kernels use
    blocks of 48, which take no more.

    Without AVX-512, more than 24 channels are in blocks of 8, 16 or 24, whichever suit the image
    (measured with AVX2): an upper bound."""
    if not has_avx512():
        return up_to_multiple(n_channels, 8 if n_channels <= 24 else 24)
    if n_channels <= BLOCK:
        return BLOCK
    return min(-(-n_channels // width) * width for width in (64, 32))


def _scratch_bytes() -> int:
    """Bytes of scratch memory, whatever the shapes (measured)."""
    return 4096 + 4120 * n_threads()
