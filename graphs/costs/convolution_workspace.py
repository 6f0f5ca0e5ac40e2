"""Workspace of convolutions on the CPU: which copies oneDNN makes, and which of them exist at the
same time (see `graphs.costs.workspace`).

Here those in the contiguous layout; channels-last has a file of its own. Returned values are bytes.
"""

from __future__ import annotations

import math

import torch

from graphs.costs.channels_last_workspace import (
    channels_last_convolution,
    channels_last_convolution_backward,
    is_in_channels_last,
)
from graphs.costs.convolution_shapes import (
    BLOCK,
    UNREORDERED_CHANNELS,
    Convolution,
    block,
    cache_bytes,
    has_avx512,
    n_threads,
    up_to_blocks,
    up_to_multiple,
    widest_unrolled,
)
from graphs.costs.layouts import copied_bytes
from graphs.costs.operators import OpCall
from graphs.costs.strided_workspace import (
    columns_fit,
    is_computed_by_phases,
    is_strided_with_gaps,
    peak_by_phases,
)

_MOST_PADDING = 3
"""Without AVX-512, outputs whose columns are padded by more than this are matrix products."""


def contiguous_copy_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the contiguous copies of the tensors that are not contiguous, such as a slice.

    The copies exist for as long as the operator runs (ATen/native/Convolution.cpp).
    """
    return sum(0 if each.is_contiguous() else each.nbytes for each in tensors)


def convolution(call: OpCall) -> int:
    """Workspace of the forward operator: the reordered input and weight and the blocked result;
    after those, the result is reordered into the output."""
    conv = Convolution.of(call)
    if conv.is_computed_by_group():
        return _forward_by_group(conv)
    if is_in_channels_last(conv):
        return channels_last_convolution(conv)
    copies_bytes = contiguous_copy_bytes(conv.x, conv.weight)
    if conv.is_volume_of_thin_kernels():
        return copies_bytes + _batch_patches_bytes(conv)
    if _is_mirrored(conv):
        if conv.is_without_onednn():
            return copies_bytes + conv.mirrored().patches_bytes
        return copies_bytes + _input_gradient_peak(conv.mirrored()) - conv.out.nbytes + 128
    if not conv.transposed and conv.is_product_of_images():
        is_dense = conv.groups == 1
        return copies_bytes + (
            0 if is_dense else max(conv.out.nbytes, conv.x.nbytes // conv.groups)
        )
    if not conv.transposed and conv.is_without_onednn():
        return copies_bytes + conv.patches_bytes
    if conv.is_inner_product():
        return copies_bytes + _inner_product_workspace(conv)
    return copies_bytes + _output_workspace(conv)


def _inner_product_workspace(conv: Convolution) -> int:
    """Workspace of a matrix product of images and weight (measured with AVX-512, 36 to 10,000
    values per image, 1 to 512 output channels, 1 and 2 threads): both in another layout if they
    have several channels, and for each thread a part of the weight."""
    n_in, n_out, n_values = conv.weight.shape[1], conv.weight.shape[0], conv.weight[0].numel()
    reordered_bytes = conv.x.nbytes + conv.weight.nbytes if n_in > 1 else 0
    if n_out == 1:
        return reordered_bytes + 384 + 640 * n_threads()
    n_at_once = 1024 if n_values > 1024 else min(n_values, 512)
    part_bytes = 256 * up_to_multiple(n_at_once, 16)
    return reordered_bytes + 512 + n_threads() * (part_bytes + 640)


def _output_workspace(conv: Convolution) -> int:
    """Workspace of oneDNN for computing the output from a contiguous input."""
    weight, out = conv.weight, conv.out
    if not conv.transposed and _is_matrix_product(conv):
        # oneDNN computes some groups of up to three channels directly, with a reordered weight
        n_in, n_out = conv.group_channels
        is_few = n_in <= 3 and n_out % 8 == 0
        return max(out.nbytes, _thread_patches_bytes(conv), weight.nbytes if is_few else 0)
    blocked_bytes = (
        _reordered_input_bytes(conv) + _reordered_weight_bytes(conv) + _blocked_bytes(out, 1)
    )
    if conv.transposed or not conv.is_float32:
        return max(blocked_bytes - out.nbytes, 2 * _blocked_bytes(out, 1))
    subsampled = 0
    if conv.is_1x1 and conv.is_strided:
        subsampled = _blocked_bytes(conv.x, 1) // math.prod(conv.stride)
    workspace = max(blocked_bytes + subsampled - out.nbytes, _blocked_bytes(out, 1))
    if has_avx512() or conv.padding[-1] <= _MOST_PADDING:
        return workspace
    return max(workspace, min(_thread_patches_bytes(conv), n_threads() * cache_bytes()))


def convolution_backward(call: OpCall) -> int:
    """Workspace of the backward operator: it computes the input's gradient, then the weight's while
    the former exists."""
    conv = Convolution.of(call)
    if conv.is_computed_by_group():
        return _backward_by_group(conv)
    if is_in_channels_last(conv):
        return channels_last_convolution_backward(conv)
    gradient = conv.out
    copies_bytes = contiguous_copy_bytes(gradient, conv.x, conv.weight)
    if conv.is_volume_of_thin_kernels():
        return copies_bytes + (_batch_patches_bytes(conv) or int(conv.mask[0]) * conv.x.nbytes)
    if conv.groups == 1 and not conv.transposed and conv.is_product_of_images():
        return copies_bytes
    wants_x, wants_weight, wants_bias = conv.mask
    is_mirrored = _is_mirrored(conv)
    if conv.is_without_onednn() and (is_mirrored or not conv.transposed):
        patches_bytes = (conv.mirrored() if is_mirrored else conv).patches_bytes
        # dilated kernels compute the bias's gradient, and then PyTorch computes it again
        bias_bytes = int(wants_bias) * gradient.shape[1] * gradient.element_size()
        return copies_bytes + patches_bytes + bias_bytes
    x_bytes = conv.x.nbytes if wants_x else 0
    weight_bytes = conv.weight.nbytes if wants_weight else 0
    peaks = [0]
    if wants_x and is_mirrored:
        peaks.append(x_bytes + _output_workspace(conv.mirrored()))
    elif wants_x:
        peaks.append(_input_gradient_peak(conv))
    if wants_weight:
        computed = conv.mirrored() if is_mirrored else conv
        peaks.append(x_bytes + _weight_gradient_peak(computed))
    bias_bytes = (
        int(wants_bias) * 3 * up_to_multiple(gradient.shape[1], BLOCK) * gradient.element_size()
    )
    return copies_bytes + max(0, max(peaks) - x_bytes - weight_bytes) + bias_bytes


def _is_mirrored(conv: Convolution) -> bool:
    """Whether a transposed convolution takes what the mirrored one takes, and 128 bytes more in the
    forward pass: without AVX-512 (measured with AVX2). With it, oneDNN has other kernels."""
    return conv.transposed and conv.is_float32 and not has_avx512()


def _batch_patches_bytes(conv: Convolution) -> int:
    """Bytes of the patches of all images and groups; 0 if the images themselves are multiplied."""
    is_plain = conv.groups == 1 and conv.images_are_patches()
    return 0 if is_plain else conv.x.shape[0] * conv.groups * conv.patches_bytes


def _forward_by_group(conv: Convolution) -> int:
    """Workspace of the forward operator of a convolution that PyTorch computes group by group: the
    patches of all images of a group and a copy of its images, and the results of the groups, which
    are concatenated at the end."""
    copies_bytes = _layout_copy_bytes(conv, conv.x, conv.weight)
    if conv.groups == 1:
        return copies_bytes + conv.batch_patches_bytes
    group_bytes = conv.batch_patches_bytes + conv.x.nbytes // conv.groups
    return copies_bytes + max(conv.out.nbytes, group_bytes)


def _backward_by_group(conv: Convolution) -> int:
    """The same for the backward operator: of the last group either the patches exist, or the
    float32 copy of the gradient that is summed for the bias. A single group is not concatenated."""
    wants_x, wants_weight, wants_bias = conv.mask
    copies_bytes = _layout_copy_bytes(conv, conv.x, conv.weight, conv.out)
    weight_bytes = conv.weight.nbytes if wants_weight else 0
    patches_bytes = conv.batch_patches_bytes if wants_weight else 0
    is_copied = wants_bias and not is_in_channels_last(conv)
    sum_bytes = 4 * (conv.out.numel() + conv.out.shape[1]) - weight_bytes if is_copied else 0
    group_bytes = max(patches_bytes, sum_bytes // conv.groups)
    if conv.groups == 1:
        return copies_bytes + group_bytes
    images_bytes = (conv.x.nbytes + conv.out.nbytes) // conv.groups
    x_bytes = conv.x.nbytes if wants_x else 0
    bias_bytes = int(wants_bias) * conv.out.shape[1] * conv.out.element_size()
    return copies_bytes + max(x_bytes + weight_bytes + bias_bytes, images_bytes + group_bytes)


def _layout_copy_bytes(conv: Convolution, *tensors: torch.Tensor) -> int:
    """Bytes of the copies of the tensors in the layout in which PyTorch convolves."""
    if is_in_channels_last(conv):
        return copied_bytes(*tensors, into=torch.channels_last)
    return contiguous_copy_bytes(*tensors)


def _input_gradient_peak(conv: Convolution) -> int:
    """Bytes at the peak of computing the input's gradient, including the gradient itself."""
    x, weight, transposed = conv.x, conv.weight, conv.transposed
    is_grouped_1x1 = conv.groups > 1 and conv.is_1x1
    copies_bytes = 2 * weight.nbytes if is_grouped_1x1 and not conv.is_strided else 0
    if not transposed and is_computed_by_phases(conv):
        return peak_by_phases(conv)
    product_bytes = max(x.nbytes, _thread_patches_bytes(conv))
    if not transposed and (_is_matrix_product(conv) or is_strided_with_gaps(conv)):
        return x.nbytes + product_bytes + copies_bytes
    scratch_bytes, n_copies = 0, 1
    if transposed and conv.is_strided:
        scratch_bytes, n_copies = _transposed_scratch_bytes(conv), 3
    padded = (0, 1) if conv.groups == 1 else (0,) if conv.is_depthwise else ()
    x_bytes, gradient_bytes = (_image_bytes(image, conv) for image in (x, conv.out))
    reordered_bytes = gradient_bytes + _blocked_bytes(weight, *padded) + scratch_bytes
    if conv.is_strided and not (transposed or conv.is_depthwise or columns_fit(conv)):
        reordered_bytes = max(reordered_bytes, product_bytes)  # directly or as a matrix product
    image_bytes = max(n_copies * x_bytes, x_bytes + max(reordered_bytes, x.nbytes))
    return image_bytes + copies_bytes


def _weight_gradient_peak(conv: Convolution) -> int:
    """Bytes at the peak of computing the weight's gradient, including the gradient itself."""
    gradient, x, weight, groups = conv.out, conv.x, conv.weight, conv.groups
    if conv.is_depthwise:
        is_direct = conv.computes_depthwise_directly()
    else:
        is_direct = (groups == 1 or conv.fills_blocks(8)) and conv.computes_in_blocks()
    product_bytes = conv.matrix_bytes + (128 if conv.transposed else 0)
    matrix_product_bytes = 0 if is_direct else weight.nbytes + product_bytes
    if groups > 1 and conv.is_1x1 and not conv.is_strided:  # group by group, each over all images
        matrix_product_bytes += (x.nbytes + gradient.nbytes) // groups
    # with few channels oneDNN may choose either way, which the shape does not tell
    is_unrolled = conv.kernel[-1] <= widest_unrolled() and not conv.is_volume_without_avx512()
    is_either = groups == 1 and x.shape[1] < block() and is_unrolled
    if not (is_direct or is_either or conv.transposed) and conv.is_float32:
        return matrix_product_bytes
    sums_bytes = _thread_sums_bytes(weight) if groups == 1 else _group_sums_bytes(conv)
    weight_bytes = _reordered_weight_bytes(conv)
    is_few = _is_read_in_place(conv)
    input_bytes = _reordered_input_bytes(conv) if is_few else _image_bytes(x, conv)
    # without AVX-512, the gradient of a weight that reads one channel has no kernel without blocks
    unreordered = UNREORDERED_CHANNELS if has_avx512() else (3,)
    if is_few and x.shape[1] not in unreordered:
        n_padded = up_to_multiple(x.shape[1], 8)  # by a kernel that has blocks of eight
        input_bytes = x.nbytes // x.shape[1] * n_padded
        weight_bytes = weight_bytes // weight.shape[1] * n_padded
    if groups == 1 and conv.is_1x1 and conv.is_strided:
        n_pixels = math.prod(gradient.shape[2:])  # those that the stride keeps, per thread
        sums_bytes += n_threads() * up_to_blocks(x.shape[1]) * n_pixels * x.element_size() + 128
    reordered_bytes = input_bytes + _image_bytes(gradient, conv) + weight_bytes + sums_bytes
    return max(reordered_bytes, weight_bytes + weight.nbytes, matrix_product_bytes)


def _blocked_bytes(tensor: torch.Tensor, *channels: int) -> int:
    """Bytes of a tensor with the dimensions `channels` padded to whole blocks."""
    shape = [
        up_to_blocks(size) if dim in channels else size for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * tensor.element_size()


def _image_bytes(images: torch.Tensor, conv: Convolution) -> int:
    """Bytes of the images of a backward call in blocks of channels, which groups of channels that
    are computed directly fill."""
    is_filled = conv.groups > 1 and not conv.is_depthwise
    if is_filled and not conv.transposed and images.dtype == torch.float32:
        return images.nbytes
    return _blocked_bytes(images, 1)


def _is_matrix_product(conv: Convolution) -> bool:
    """Whether a grouped convolution is computed as matrix products, because the channels of a group
    do not fill blocks of four, or eight without AVX-512 (measured with 1 to 64 channels per
    group)."""
    is_grouped = conv.groups > 1 and not conv.is_depthwise
    is_filled = conv.fills_blocks(4 if has_avx512() else 8)
    return is_grouped and conv.is_float32 and not is_filled


def _thread_patches_bytes(conv: Convolution) -> int:
    """Bytes of the patches (im2col) per thread."""
    return n_threads() * conv.slice_patches_bytes + 128


def _transposed_scratch_bytes(conv: Convolution) -> int:
    """Scratch memory of transposed convolutions with strides above 1: for each phase of the stride
    (2 x 2 has 4) and each thread, depending on the output channels. Measured with 8 to 512
    channels, strides to 4 and 4 threads."""
    n_phases = math.prod(conv.stride)
    n_channels = min(128, max(32, up_to_blocks(conv.weight.shape[0])))
    return 2048 * (n_phases - 1) * (n_threads() + 1) + n_threads() * (8216 + 512 * n_channels)


def _thread_sums_bytes(weight: torch.Tensor) -> int:
    """Bytes of the threads' own sums of the weight's gradient. With fewer blocks of channels than
    threads, the threads divide the images among them, and each needs a sum of its own. An upper
    bound: measured with 2 and 4 threads."""
    n_blocks = math.prod(-(-size // BLOCK) for size in weight.shape[:2])
    n_sums = -(-n_threads() // max(1, n_blocks // 2)) - 1
    bias_bytes = 2 * up_to_multiple(weight.shape[0], BLOCK) * weight.element_size()
    return n_sums * (_blocked_bytes(weight, 0) + bias_bytes) + 24704 if n_sums else 0


def _group_sums_bytes(conv: Convolution) -> int:
    """The same for the groups of a convolution, which the threads divide among them: with few
    groups, some divide the images of one. An upper bound: measured with 2 and 4 threads."""
    if conv.groups >= 2 * n_threads() or conv.groups % n_threads() == 0:
        return 0
    is_narrow = not conv.fills_blocks(BLOCK)
    n_sums = max(-(-n_threads() // conv.groups) - 1, int(is_narrow))
    return n_sums * conv.weight.nbytes + 2 * (n_threads() + 1) * 4096 + 512


def _reordered_input_bytes(conv: Convolution) -> int:
    """Bytes of the reordered input; 0 if it is read in place."""
    if not _is_read_in_place(conv):
        return _blocked_bytes(conv.x, 1)
    return 0 if conv.x.shape[1] in UNREORDERED_CHANNELS else conv.x.nbytes


def _reordered_weight_bytes(conv: Convolution) -> int:
    """Bytes of the reordered weight."""
    if conv.groups != 1:
        return _blocked_bytes(conv.weight, 0) if conv.is_depthwise else conv.weight.nbytes
    padded = (0,) if _is_read_in_place(conv) else (0, 1)
    return _blocked_bytes(conv.weight, *padded)


def _is_read_in_place(conv: Convolution) -> bool:
    """Whether an input has so few channels that they are not padded to a block. (Those with a
    number of channels in UNREORDERED_CHANNELS are not even reordered.)"""
    return conv.x.shape[1] < block() and conv.groups == 1 and not conv.is_1x1
