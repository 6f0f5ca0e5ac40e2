"""Workspace of convolutions on the CPU: the order of oneDNN's copies (`workspace`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphs.costs.channels_last_workspace import (
    channels_last_convolution,
    channels_last_convolution_backward,
    is_in_channels_last,
)
from graphs.costs.convolution_shapes import (
    BLOCK,
    OF_IMAGES,
    WIDEST_UNROLLED,
    has_group_blocks,
    is_computed_directly,
    is_depthwise,
    is_product_of_images,
    is_without_onednn,
    matrix_bytes,
    n_threads,
    patches_bytes,
    plain_bytes,
    up_to_blocks,
    weight_is_blocked,
)
from graphs.costs.operators import OpCall


def _blocked(tensor: torch.Tensor, *channels: int) -> int:
    """Bytes of a tensor with the dimensions `channels` padded to whole blocks."""
    shape = [
        up_to_blocks(size) if dim in channels else size for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * tensor.element_size()


def strided_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of contiguous copies of those that are not, such as a part of a concatenation.

    They exist for as long as the operator runs (ATen/native/Convolution.cpp).
    """
    return sum(0 if each.is_contiguous() else plain_bytes(each) for each in tensors)


def convolution(call: OpCall) -> int:
    """Reordered input and weight and the blocked result, then the result is reordered."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = call.args
    out = call.outputs()[0]
    if is_in_channels_last(x, weight):
        return channels_last_convolution(call)
    if not transposed and is_product_of_images(x, weight, stride, padding, dilation, groups):
        return strided_bytes(x)
    if not transposed and is_without_onednn(x, weight, groups):
        return strided_bytes(x) + patches_bytes(weight, out)
    if not transposed and _is_of_matrices(x, weight, groups):
        return strided_bytes(x) + max(plain_bytes(out), _of_patches(weight, out))
    blocked = _input(x, weight, groups) + _weight(x, weight, groups) + _blocked(out, 1)
    if transposed or x.dtype != torch.float32:
        return strided_bytes(x) + max(blocked - plain_bytes(out), 2 * _blocked(out, 1))
    copied = _blocked(x, 1) // math.prod(stride) if math.prod(weight.shape[2:]) == 1 else 0
    subsampled = copied if any(step > 1 for step in stride) else 0
    return strided_bytes(x) + max(blocked + subsampled - plain_bytes(out), _blocked(out, 1))


def convolution_backward(call: OpCall) -> int:
    """First the gradient of the input, then that of the weight, beside it."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, padding, dilation, transposed = call.args[4:8]
    groups, mask = int(call.args[9]), call.args[10]
    if is_in_channels_last(x, weight):
        return channels_last_convolution_backward(call)
    if not transposed and is_product_of_images(x, weight, stride, padding, dilation, groups):
        return strided_bytes(gradient, x)
    of_x, of_weight = (plain_bytes(x) if mask[0] else 0), (plain_bytes(weight) if mask[1] else 0)
    if not transposed and is_without_onednn(x, weight, groups):
        # kernels with gaps compute the bias's gradient, which is then computed once more
        of_bias = int(mask[2]) * gradient.shape[1] * gradient.element_size()
        return strided_bytes(gradient, x) + patches_bytes(weight, gradient) + of_bias
    peaks = [0]
    if mask[0]:
        peaks.append(_of_input(call))
    if mask[1]:
        peaks.append(of_x + _of_weight(call))
    of_bias = int(mask[2]) * 3 * up_to_blocks(gradient.shape[1]) * gradient.element_size()
    return strided_bytes(gradient, x) + max(0, max(peaks) - of_x - of_weight) + of_bias


def _of_input(call: OpCall) -> int:
    """Bytes at the peak of computing the input's gradient, which is among them."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, transposed, groups = (call.args[at] for at in (4, 7, 9))
    is_of_pixels = groups > 1 and math.prod(weight.shape[2:]) == 1
    of_pixels = 2 * plain_bytes(weight) if is_of_pixels else 0
    if not transposed and _is_of_matrices(x, weight, groups):
        return plain_bytes(x) + max(plain_bytes(x), _of_patches(weight, gradient)) + of_pixels
    padded = _blocked(weight, 0, 1) if groups == 1 else _weight(x, weight, groups)
    is_alone = is_depthwise(weight, groups) and not transposed
    scratch = 0 if is_alone else _strided_scratch(weight, stride)
    blocked = _blocked(gradient, 1) + padded + scratch
    n_copies = 3 if any(step > 1 for step in stride) and not is_alone else 1
    of_images = max(n_copies * _blocked(x, 1), _blocked(x, 1) + max(blocked, plain_bytes(x)))
    return of_images + of_pixels


def _of_weight(call: OpCall) -> int:
    """Bytes at the peak of computing the weight's gradient, which is among them."""
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = call.args
    if is_depthwise(weight, groups):
        is_direct = is_computed_directly(x, weight, stride, padding, dilation)
    else:
        has_blocks = groups == 1 or has_group_blocks(weight, groups, 8)
        is_direct = has_blocks and weight_is_blocked(x, weight, call)
    as_matrices = 0 if is_direct else plain_bytes(weight) + matrix_bytes(weight, gradient)
    if groups > 1 and math.prod(weight.shape[2:]) == 1:  # one group of all images after the other
        as_matrices += (plain_bytes(x) + plain_bytes(gradient)) // groups
    # of few channels either way, which the shape does not tell
    is_either = groups == 1 and x.shape[1] < BLOCK and weight.shape[-1] <= WIDEST_UNROLLED
    if not (is_direct or is_either or transposed) and x.dtype == torch.float32:
        return as_matrices
    of_threads = _sums_of_threads(weight) if groups == 1 else 0
    small = _weight(x, weight, groups)
    blocked = _input(x, weight, groups) + _blocked(gradient, 1) + small + of_threads
    return max(blocked, small + plain_bytes(weight), as_matrices)


def _is_of_matrices(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Groups whose channels fill no block of four; measured with 1 to 40 channels for each."""
    is_grouped = groups > 1 and not is_depthwise(weight, groups)
    return is_grouped and x.dtype == torch.float32 and not has_group_blocks(weight, groups, 4)


def _of_patches(weight: torch.Tensor, out: torch.Tensor) -> int:
    return n_threads() * patches_bytes(weight, out) + 128


def _strided_scratch(weight: torch.Tensor, stride: Sequence[int]) -> int:
    """Of the input's gradient where the kernel moves by several pixels: for each phase of the
    stride and each thread, by the output channels. At most: seen with 8 to 512 channels, strides
    to 4 and 4 threads."""
    n_phases = math.prod(stride)
    if n_phases == 1:
        return 0
    n_channels = min(128, max(32, up_to_blocks(weight.shape[0])))
    return 2048 * (n_phases - 1) * (n_threads() + 1) + n_threads() * (8216 + 512 * n_channels)


def _sums_of_threads(weight: torch.Tensor) -> int:
    """Of the weight's gradient where there are fewer blocks of channels than threads, which then
    share the images and have a sum each. At most: measured with 2 and 4 threads."""
    n_blocks = math.prod(up_to_blocks(size) // BLOCK for size in weight.shape[:2])
    n_sums = -(-torch.get_num_threads() // max(1, n_blocks // 2)) - 1
    of_bias = 2 * up_to_blocks(weight.shape[0]) * weight.element_size()
    return n_sums * (_blocked(weight, 0) + of_bias) + 24704 if n_sums else 0


def _input(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered input, if it is reordered."""
    if not _is_read_in_place(x, weight, groups):
        return _blocked(x, 1)
    return 0 if x.shape[1] in OF_IMAGES else plain_bytes(x)


def _weight(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered weight."""
    if groups != 1:
        return _blocked(weight, 0) if is_depthwise(weight, groups) else plain_bytes(weight)
    return _blocked(weight, 0) if _is_read_in_place(x, weight, groups) else _blocked(weight, 0, 1)


def _is_read_in_place(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Inputs of few channels are not padded, and images not reordered either."""
    return x.shape[1] < BLOCK and groups == 1 and math.prod(weight.shape[2:]) > 1
