"""Workspace of convolutions in the channels-last layout on the CPU.

In this layout oneDNN reads the images in place and reorders only the weight into blocks of
channels. What it allocates was measured with torch 2.13 and AVX-512: dense and grouped convolutions
of 1 to 320 channels, 1 to 40 per group, kernels of 1 to 7, strides to 4, dilations to 4, images of
1 to 28 pixels a side, 1 and 2 threads. `tests/graphs/costs/test_convolution_layouts.py` repeats a
part of this. The returned values are bytes.
"""

from __future__ import annotations

import math

import torch

from graphs.costs.convolution_shapes import (
    BLOCK,
    is_computed_directly,
    is_depthwise,
    is_without_onednn,
    matrix_bytes,
    n_threads,
    patches_bytes,
    plain_bytes,
    up_to_blocks,
    weight_is_blocked,
)
from graphs.costs.layouts import copied_bytes, suggested_format
from graphs.costs.operators import OpCall

_CHANNELS_LAST = torch.channels_last

_STRIDED_1X1_BYTES = 4096
"""Upper bound on what 1 x 1 kernels with a stride above 1 allocate besides."""


def is_in_channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the input's or the weight's strides are channels-last, which is when PyTorch
    convolves in this layout (`mkldnn_conv_use_channels_last` of ATen/native/ConvUtils.h). A 1 x 1
    weight with its default strides does not count, although both layouts have the same bytes."""
    return x.dim() == 4 and _CHANNELS_LAST in (suggested_format(x), suggested_format(weight))


def channels_last_convolution(call: OpCall) -> int:
    """Workspace of the forward operator. A transposed convolution computes what the input's
    gradient of an ordinary one computes."""
    x: torch.Tensor = call.args[0]
    weight: torch.Tensor = call.args[1]
    stride, dilation, transposed, groups = (call.args[at] for at in (3, 5, 6, 8))
    out = call.outputs()[0]
    copied = copied_bytes(x, weight, into=_CHANNELS_LAST) + int(out.shape[1]) * out.element_size()
    if transposed:
        image_bytes = plain_bytes(out) if _is_1x1(weight) else 0
        return copied + max(
            image_bytes, _input_gradient_workspace(out, x, weight, stride, dilation, groups)
        )
    all_patches_bytes = patches_bytes(weight, out) if is_without_onednn(x, weight, groups) else 0
    return copied + max(all_patches_bytes, _output_workspace(out, weight, stride, groups))


def _output_workspace(
    out: torch.Tensor, weight: torch.Tensor, stride: list[int], groups: int
) -> int:
    """Workspace of computing the output, without copies of inputs that are in another layout."""
    n_in, n_out = weight.shape[1], weight.shape[0] // groups
    if _is_1x1(weight) and groups > 1:
        return plain_bytes(out)
    if is_depthwise(weight, groups):
        return _depthwise_block_bytes(weight) + 256  # the 256: dilated kernels, on small images
    if groups > 1 and n_in % 4 == 0 and n_in < BLOCK and n_out in (4, 8):
        return plain_bytes(weight)  # a block has as many channels as a group, so no padding
    if _is_matrix_product(weight, stride):
        return 0
    if groups > 1 and n_in <= BLOCK:
        return _blocked_bytes(weight, groups)
    return n_in * _padded_channels(n_out) * groups * _kernel_bytes(weight) + _scratch_bytes()


def channels_last_convolution_backward(call: OpCall) -> int:
    """Workspace of the backward operator, which computes the input's gradient, then the weight's.

    The larger of both counts, with the copies that exist throughout.
    """
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, dilation, groups, mask = (call.args[at] for at in (4, 6, 9, 10))
    bias_bytes = int(gradient.shape[1]) * gradient.element_size()
    copies_bytes = copied_bytes(gradient, x, into=_CHANNELS_LAST) + bias_bytes
    reordered = copied_bytes(weight, into=_CHANNELS_LAST)
    peaks = [0]
    if mask[0]:
        peaks.append(
            reordered + _input_gradient_workspace(x, gradient, weight, stride, dilation, groups)
        )
    if mask[1]:
        peaks.append(reordered + _weight_gradient_workspace(call))
    if is_without_onednn(x, weight, groups):
        peaks.append(reordered + patches_bytes(weight, gradient))
    return copies_bytes + max(peaks)


def _input_gradient_workspace(
    x: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> int:
    """Workspace of computing the gradient of the input `x`."""
    n_in, n_out = weight.shape[1], weight.shape[0] // groups
    if _is_1x1(weight) and groups > 1:
        return plain_bytes(x) + plain_bytes(weight)
    if is_depthwise(weight, groups):
        has_gaps, is_strided = (any(step > 1 for step in steps) for steps in (dilation, stride))
        if has_gaps and is_strided:  # computed as matrix products, per thread
            image_bytes = plain_bytes(x) // max(1, x.shape[0] * groups)
            thread_bytes = patches_bytes(weight, gradient) + image_bytes
            return _depthwise_block_bytes(weight) + n_threads() * thread_bytes + 256
        return _blocked_bytes(weight, groups) if has_gaps else _depthwise_block_bytes(weight)
    if _is_matrix_product(weight, stride):
        return 0
    if groups > 1 and n_out <= BLOCK:
        return _blocked_bytes(weight, groups)
    scratch = max(_strided_scratch_bytes(gradient, weight, stride, groups), _scratch_bytes() + 128)
    return _padded_channels(n_in) * n_out * groups * _kernel_bytes(weight) + scratch


def _strided_scratch_bytes(
    gradient: torch.Tensor, weight: torch.Tensor, stride: list[int], groups: int
) -> int:
    """Scratch memory of the input's gradient for strides above 1: per thread, one image of the
    gradient with the margin that a phase of the kernel needs (a stride of 2 x 2 has 4 phases). An
    upper bound: measured with 8 to 256 channels, strides to 4, kernels to 7, 10 to 112 pixels a
    side."""
    n_phases = math.prod(stride)
    if n_phases == 1:
        return 0
    sides = zip(gradient.shape[2:], weight.shape[2:], stride, strict=True)
    n_pixels = math.prod(
        size + (kernel - 1 if step % 2 else -(-kernel // step)) for size, kernel, step in sides
    )
    n_channels = max(64, weight.shape[0] // groups)
    image_bytes = max(128, -(-n_pixels // 64) * 64) * n_channels * gradient.element_size()
    thread_bytes = 8216 + (image_bytes if groups == 1 else 2 * image_bytes + 8192)
    return 2048 * (n_phases - 1) * (n_threads() + 1) + n_threads() * thread_bytes


def _weight_gradient_workspace(call: OpCall) -> int:
    """Workspace of computing the weight's gradient: a copy of the weight beside the sums in blocks
    of 16 x 16 channels.

    Every group has its own block, even a group of one channel. So depthwise kernels that are not
    computed directly, such as ConvNeXt's 7 x 7, take 257 times the weight: 256 for the block and
    one for the copy.
    """
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, padding, dilation = call.args[4:7]
    groups: int = call.args[9]
    if _is_1x1(weight) and groups > 1:
        images_bytes = plain_bytes(x) + plain_bytes(gradient)
        return images_bytes // groups + plain_bytes(weight)
    if is_depthwise(weight, groups) and is_computed_directly(x, weight, stride, padding, dilation):
        return 2 * _depthwise_block_bytes(weight)
    if _is_matrix_product(weight, stride):
        return 0
    image_bytes = plain_bytes(x) // max(1, x.shape[0] * groups)
    matrix_product_bytes = matrix_bytes(weight, gradient) + n_threads() * image_bytes + 128
    has_gaps = any(step > 1 for step in dilation)
    if is_depthwise(weight, groups) and has_gaps and any(step > 1 for step in stride):
        return matrix_product_bytes
    is_blocked = is_depthwise(weight, groups) or weight_is_blocked(x, weight, call)
    if groups == 1 and not is_blocked:
        return matrix_product_bytes
    if groups == 1 and weight.shape[1] < BLOCK:
        block_bytes = weight.shape[1] * up_to_blocks(weight.shape[0]) * _kernel_bytes(weight)
    else:
        block_bytes = _blocked_bytes(weight, groups)
    block_bytes += plain_bytes(weight) + (_STRIDED_1X1_BYTES if _is_1x1(weight) else 0)
    if is_depthwise(weight, groups) and 1 in weight.shape[2:]:  # the kernel is a row or a column
        block_bytes += plain_bytes(weight) + 128
    return block_bytes if is_blocked else max(block_bytes, matrix_product_bytes)


def _is_1x1(weight: torch.Tensor) -> bool:
    """Whether the kernel is 1 x 1."""
    return math.prod(weight.shape[2:]) == 1


def _is_matrix_product(weight: torch.Tensor, stride: list[int]) -> bool:
    """Whether this is a 1 x 1 convolution in float32 with stride 1: a matrix product, which copies
    nothing if it is dense."""
    is_plain = weight.dtype == torch.float32 and all(step == 1 for step in stride)
    return is_plain and _is_1x1(weight)


def _blocked_bytes(weight: torch.Tensor, groups: int) -> int:
    """Bytes of the weight with each group's channels, in and out, padded to blocks of 16."""
    n_channels = up_to_blocks(weight.shape[1]) * up_to_blocks(weight.shape[0] // groups)
    return groups * n_channels * _kernel_bytes(weight)


def _depthwise_block_bytes(weight: torch.Tensor) -> int:
    """Bytes of a depthwise weight in blocks of 16 groups each."""
    return up_to_blocks(weight.shape[0]) * _kernel_bytes(weight)


def _kernel_bytes(weight: torch.Tensor) -> int:
    """Bytes of the kernel between one input and one output channel."""
    return math.prod(weight.shape[2:]) * weight.element_size()


def _padded_channels(n_channels: int) -> int:
    """The number of channels padded to blocks of 64 or 32, whichever pad least. Some kernels use
    blocks of 48, which take no more."""
    if n_channels <= BLOCK:
        return BLOCK
    return min(-(-n_channels // width) * width for width in (64, 32))


def _scratch_bytes() -> int:
    """Bytes of scratch memory, whatever the shapes (measured)."""
    return 4096 + 4120 * n_threads()
