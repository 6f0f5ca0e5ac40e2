"""Workspace of convolutions on the CPU in the contiguous layout: which copies oneDNN makes, and
which of them exist at the same time (see `graphs.costs.workspace`).

The convolution calls passed in have the arguments of `aten.convolution` or
`aten.convolution_backward`; returned values are bytes.
"""

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
    UNREORDERED_CHANNELS,
    WIDEST_UNROLLED,
    has_avx512,
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
    up_to_multiple,
    weight_is_blocked,
)
from graphs.costs.operators import OpCall
from graphs.costs.strided_workspace import (
    columns_fit,
    is_computed_by_phases,
    is_strided_with_gaps,
    peak_by_phases,
)


def _blocked_bytes(tensor: torch.Tensor, *channels: int) -> int:
    """Bytes of a tensor with the dimensions `channels` padded to whole blocks."""
    shape = [
        up_to_blocks(size) if dim in channels else size for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * tensor.element_size()


def contiguous_copy_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the contiguous copies of the tensors that are not contiguous, such as a slice.

    The copies exist for as long as the operator runs (ATen/native/Convolution.cpp).
    """
    return sum(0 if each.is_contiguous() else plain_bytes(each) for each in tensors)


def convolution(call: OpCall) -> int:
    """Workspace of the forward operator: the reordered input and weight and the blocked result;
    after those, the result is reordered into the output."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = call.args
    out = call.outputs()[0]
    if is_in_channels_last(x, weight):
        return channels_last_convolution(call)
    if not transposed and is_product_of_images(x, weight, stride, padding, dilation):
        return contiguous_copy_bytes(x) + (
            0 if groups == 1 else max(plain_bytes(out), plain_bytes(x) // groups)
        )
    if not transposed and is_without_onednn(x, weight, groups):
        return contiguous_copy_bytes(x) + patches_bytes(weight, out)
    if not transposed and _is_matrix_product(x, weight, groups):
        # oneDNN computes some groups of up to three channels directly, with a reordered weight
        is_few = weight.shape[1] <= 3 and weight.shape[0] // groups % 8 == 0
        patches = _thread_patches_bytes(weight, out)
        product_bytes = max(plain_bytes(out), patches, plain_bytes(weight) if is_few else 0)
        return contiguous_copy_bytes(x) + product_bytes
    blocked_bytes = (
        _reordered_input_bytes(x, weight, groups)
        + _reordered_weight_bytes(x, weight, groups)
        + _blocked_bytes(out, 1)
    )
    if transposed or x.dtype != torch.float32:
        return contiguous_copy_bytes(x) + max(
            blocked_bytes - plain_bytes(out), 2 * _blocked_bytes(out, 1)
        )
    copied = _blocked_bytes(x, 1) // math.prod(stride) if math.prod(weight.shape[2:]) == 1 else 0
    subsampled = copied if any(step > 1 for step in stride) else 0
    return contiguous_copy_bytes(x) + max(
        blocked_bytes + subsampled - plain_bytes(out), _blocked_bytes(out, 1)
    )


def convolution_backward(call: OpCall) -> int:
    """Workspace of the backward operator: it computes the input's gradient, then the weight's while
    the former exists."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, padding, dilation, transposed = call.args[4:8]
    groups, mask = int(call.args[9]), call.args[10]
    if is_in_channels_last(x, weight):
        return channels_last_convolution_backward(call)
    is_plain = groups == 1 and not transposed
    if is_plain and is_product_of_images(x, weight, stride, padding, dilation):
        return contiguous_copy_bytes(gradient, x)
    x_bytes, w_bytes = (plain_bytes(x) if mask[0] else 0), (plain_bytes(weight) if mask[1] else 0)
    if not transposed and is_without_onednn(x, weight, groups):
        # dilated kernels compute the bias's gradient, and then PyTorch computes it again
        bias_bytes = int(mask[2]) * gradient.shape[1] * gradient.element_size()
        return contiguous_copy_bytes(gradient, x) + patches_bytes(weight, gradient) + bias_bytes
    peaks = [0]
    if mask[0]:
        peaks.append(_input_gradient_peak(call))
    if mask[1]:
        peaks.append(x_bytes + _weight_gradient_peak(call))
    bias_bytes = int(mask[2]) * 3 * up_to_blocks(gradient.shape[1]) * gradient.element_size()
    return contiguous_copy_bytes(gradient, x) + max(0, max(peaks) - x_bytes - w_bytes) + bias_bytes


def _input_gradient_peak(call: OpCall) -> int:
    """Bytes at the peak of computing the input's gradient, including the gradient itself."""
    gradient: torch.Tensor = call.args[0]
    x: torch.Tensor = call.args[1]
    weight: torch.Tensor = call.args[2]
    stride, transposed, groups = (call.args[at] for at in (4, 7, 9))
    is_strided = any(step > 1 for step in stride)
    is_grouped_1x1 = groups > 1 and math.prod(weight.shape[2:]) == 1
    copies_bytes = 2 * plain_bytes(weight) if is_grouped_1x1 and not is_strided else 0
    if not transposed and is_computed_by_phases(call):
        return peak_by_phases(call)
    product_bytes = max(plain_bytes(x), _thread_patches_bytes(weight, gradient))
    if not transposed and (_is_matrix_product(x, weight, groups) or is_strided_with_gaps(call)):
        return plain_bytes(x) + product_bytes + copies_bytes
    scratch_bytes, n_copies = 0, 1
    if transposed and is_strided:
        scratch_bytes, n_copies = _transposed_scratch_bytes(weight, stride), 3
    padded = (0, 1) if groups == 1 else (0,) if is_depthwise(weight, groups) else ()
    x_bytes, gradient_bytes = (_image_bytes(image, call) for image in (x, gradient))
    reordered_bytes = gradient_bytes + _blocked_bytes(weight, *padded) + scratch_bytes
    if is_strided and not (transposed or is_depthwise(weight, groups) or columns_fit(call)):
        reordered_bytes = max(reordered_bytes, product_bytes)  # directly or as a matrix product
    image_bytes = max(n_copies * x_bytes, x_bytes + max(reordered_bytes, plain_bytes(x)))
    return image_bytes + copies_bytes


def _image_bytes(images: torch.Tensor, call: OpCall) -> int:
    """Bytes of the images of a backward call in blocks of channels, which groups of channels that
    are computed directly fill."""
    weight: torch.Tensor = call.args[2]
    transposed, groups = call.args[7], call.args[9]
    is_filled = groups > 1 and not is_depthwise(weight, groups)
    if is_filled and not transposed and images.dtype == torch.float32:
        return plain_bytes(images)
    return _blocked_bytes(images, 1)


def _weight_gradient_peak(call: OpCall) -> int:
    """Bytes at the peak of computing the weight's gradient, including the gradient itself."""
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = call.args
    if is_depthwise(weight, groups):
        is_direct = is_computed_directly(x, weight, stride, padding, dilation)
    else:
        has_blocks = groups == 1 or has_group_blocks(weight, groups, 8)
        is_direct = has_blocks and weight_is_blocked(x, weight, call)
    matrix_product_bytes = 0 if is_direct else plain_bytes(weight) + matrix_bytes(weight, gradient)
    is_1x1, is_strided = math.prod(weight.shape[2:]) == 1, any(step > 1 for step in stride)
    if groups > 1 and is_1x1 and not is_strided:  # group by group, each over all images
        matrix_product_bytes += (plain_bytes(x) + plain_bytes(gradient)) // groups
    # with few channels oneDNN may choose either way, which the shape does not tell
    is_either = groups == 1 and x.shape[1] < BLOCK and weight.shape[-1] <= WIDEST_UNROLLED
    if not (is_direct or is_either or transposed) and x.dtype == torch.float32:
        return matrix_product_bytes
    sums_bytes = _thread_sums_bytes(weight) if groups == 1 else _group_sums_bytes(weight, groups)
    weight_bytes = _reordered_weight_bytes(x, weight, groups)
    is_few = _is_read_in_place(x, weight, groups)
    input_bytes = _reordered_input_bytes(x, weight, groups) if is_few else _image_bytes(x, call)
    if is_few and x.shape[1] not in UNREORDERED_CHANNELS:
        n_padded = up_to_multiple(x.shape[1], 8)  # by a kernel that has blocks of eight
        input_bytes = plain_bytes(x) // x.shape[1] * n_padded
        weight_bytes = weight_bytes // weight.shape[1] * n_padded
    if groups == 1 and is_1x1 and is_strided:
        n_pixels = math.prod(gradient.shape[2:])  # those that the stride keeps, per thread
        sums_bytes += n_threads() * up_to_blocks(x.shape[1]) * n_pixels * x.element_size() + 128
    reordered_bytes = input_bytes + _image_bytes(gradient, call) + weight_bytes + sums_bytes
    return max(reordered_bytes, weight_bytes + plain_bytes(weight), matrix_product_bytes)


def _is_matrix_product(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether a grouped convolution is computed as matrix products, because the channels of a group
    do not fill blocks of four, or eight without AVX-512 (measured with 1 to 64 channels per
    group)."""
    is_grouped = groups > 1 and not is_depthwise(weight, groups)
    n_channels = 4 if has_avx512() else 8
    is_filled = has_group_blocks(weight, groups, n_channels)
    return is_grouped and x.dtype == torch.float32 and not is_filled


def _thread_patches_bytes(weight: torch.Tensor, out: torch.Tensor) -> int:
    """Bytes of the patches (im2col) of one image per thread."""
    return n_threads() * patches_bytes(weight, out) + 128


def _transposed_scratch_bytes(weight: torch.Tensor, stride: Sequence[int]) -> int:
    """Scratch memory of transposed convolutions with strides above 1: for each phase of the stride
    (2 x 2 has 4) and each thread, depending on the output channels. Measured with 8 to 512
    channels, strides to 4 and 4 threads."""
    n_phases = math.prod(stride)
    n_channels = min(128, max(32, up_to_blocks(weight.shape[0])))
    return 2048 * (n_phases - 1) * (n_threads() + 1) + n_threads() * (8216 + 512 * n_channels)


def _thread_sums_bytes(weight: torch.Tensor) -> int:
    """Bytes of the threads' own sums of the weight's gradient. With fewer blocks of channels than
    threads, the threads divide the images among them, and each needs a sum of its own. An upper
    bound: measured with 2 and 4 threads."""
    n_blocks = math.prod(up_to_blocks(size) // BLOCK for size in weight.shape[:2])
    n_sums = -(-torch.get_num_threads() // max(1, n_blocks // 2)) - 1
    bias_bytes = 2 * up_to_blocks(weight.shape[0]) * weight.element_size()
    return n_sums * (_blocked_bytes(weight, 0) + bias_bytes) + 24704 if n_sums else 0


def _group_sums_bytes(weight: torch.Tensor, groups: int) -> int:
    """The same for the groups of a convolution, which the threads divide among them: with few
    groups, some divide the images of one. An upper bound: measured with 2 and 4 threads."""
    if groups >= 2 * n_threads() or groups % n_threads() == 0:
        return 0
    is_narrow = not has_group_blocks(weight, groups, BLOCK)
    n_sums = max(-(-n_threads() // groups) - 1, int(is_narrow))
    return n_sums * plain_bytes(weight) + 2 * (n_threads() + 1) * 4096 + 512


def _reordered_input_bytes(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered input; 0 if it is read in place."""
    if not _is_read_in_place(x, weight, groups):
        return _blocked_bytes(x, 1)
    return 0 if x.shape[1] in UNREORDERED_CHANNELS else plain_bytes(x)


def _reordered_weight_bytes(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered weight."""
    if groups != 1:
        return _blocked_bytes(weight, 0) if is_depthwise(weight, groups) else plain_bytes(weight)
    return (
        _blocked_bytes(weight, 0)
        if _is_read_in_place(x, weight, groups)
        else _blocked_bytes(weight, 0, 1)
    )


def _is_read_in_place(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether an input has so few channels that they are not padded to a block. (Those with a
    number of channels in UNREORDERED_CHANNELS are not even reordered.)"""
    return x.shape[1] < BLOCK and groups == 1 and math.prod(weight.shape[2:]) > 1
