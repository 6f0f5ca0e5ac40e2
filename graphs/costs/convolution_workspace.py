"""Workspace of convolutions on the CPU: the order of oneDNN's copies (`workspace`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphs.costs.operators import OpCall

_BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512 (8 with AVX2, which takes no more)."""

_OF_IMAGES = (1, 3)
"""Channels of inputs that are read as they lie."""

_WIDEST_UNROLLED = 14
"""Columns of a convolution kernel; wider ones are computed as matrix products."""


def _blocked(tensor: torch.Tensor, *channels: int) -> int:
    """Bytes of a tensor with the dimensions `channels` padded to whole blocks."""
    shape = [
        _up_to_blocks(size) if dim in channels else size for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * tensor.element_size()


def _up_to_blocks(n_channels: int) -> int:
    return -(-n_channels // _BLOCK) * _BLOCK


def plain_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def strided_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of contiguous copies of those that are not, such as a part of a concatenation.

    They exist for as long as the operator runs (ATen/native/Convolution.cpp).
    """
    return sum(0 if each.is_contiguous() else plain_bytes(each) for each in tensors)


def convolution(call: OpCall) -> int:
    """Reordered input and weight and the blocked result, then the result is reordered."""
    x, weight, _, stride, _, _, transposed, _, groups = call.args
    out = call.outputs()[0]
    if keeps_channels_last(x):
        copies = 1 if _is_depthwise(weight, groups) else 2
        return copies * _blocked(weight, 0) + out.shape[1] * out.element_size()  # and the bias
    if not transposed and _is_without_onednn(x, weight, groups):
        return strided_bytes(x) + _patches(weight, out)
    blocked = _input(x, weight, groups) + _weight(x, weight, groups) + _blocked(out, 1)
    if transposed or x.dtype != torch.float32:
        return strided_bytes(x) + max(blocked - plain_bytes(out), 2 * _blocked(out, 1))
    copied = _blocked(x, 1) // math.prod(stride) if math.prod(weight.shape[2:]) == 1 else 0
    subsampled = copied if any(step > 1 for step in stride) else 0
    return strided_bytes(x) + max(blocked + subsampled - plain_bytes(out), _blocked(out, 1))


def convolution_backward(call: OpCall) -> int:
    """First the gradient of the input, then that of the weight, beside it."""
    gradient, x, weight, _, stride, _, _, transposed, _, groups, mask = call.args
    if keeps_channels_last(x):
        is_laid_out = gradient.is_contiguous(memory_format=torch.channels_last)
        copied = 0 if is_laid_out else plain_bytes(gradient)
        is_small = math.prod(weight.shape[2:]) <= 9
        if _is_depthwise(weight, groups) and not is_small:
            # kernels larger than 3 x 3 (ConvNeXt's) are summed in 256 partial results, whatever the
            # number of threads
            of_weight = 257 * plain_bytes(weight)
        else:
            of_weight = (2 if _is_depthwise(weight, groups) else 3) * _blocked(weight, 0)
        of_bias: int = gradient.shape[1] * gradient.element_size()
        return copied + of_weight + of_bias
    of_x, of_weight = (plain_bytes(x) if mask[0] else 0), (plain_bytes(weight) if mask[1] else 0)
    if not transposed and _is_without_onednn(x, weight, groups):
        return strided_bytes(gradient, x) + _patches(weight, gradient)
    of_bias = mask[2] * 3 * _up_to_blocks(gradient.shape[1]) * gradient.element_size()
    peaks = [0]
    if mask[0]:
        padded = _blocked(weight, 0, 1) if groups == 1 else plain_bytes(weight)
        blocked = _blocked(gradient, 1) + padded + _strided_scratch(weight, stride)
        peaks.append(_blocked(x, 1) + max(blocked, of_x))
        if any(step > 1 for step in stride):
            peaks.append(3 * _blocked(x, 1))
    sizes = zip(weight.shape[2:], x.shape[2:], strict=True)
    is_larger = x.shape[1] < _BLOCK and any(kernel > size for kernel, size in sizes)
    if mask[1] and groups == 1 and (weight.shape[-1] > _WIDEST_UNROLLED or is_larger):
        # as matrix products (the patches of a ViT): wide kernels, and of few channels those larger
        # than the image; per thread, four copies of the weight and the patches of one image
        per_thread = 4 * plain_bytes(weight) + _patches(weight, gradient)
        peaks.append(of_x + of_weight + torch.get_num_threads() * per_thread + 256)
    if mask[1] and (groups != 1 or weight.shape[-1] <= _WIDEST_UNROLLED):
        of_threads = _sums_of_threads(weight) if groups == 1 else 0
        small = _weight(x, weight, groups)
        blocked = _input(x, weight, groups) + _blocked(gradient, 1) + small + of_threads
        peaks.append(of_x + max(blocked, small + of_weight))
    return strided_bytes(gradient, x) + max(0, max(peaks) - of_x - of_weight) + of_bias


_LARGEST_WITHOUT_ONEDNN = 20480
"""Elements of a single image (`use_mkldnn` of ATen/native/Convolution.cpp)."""


def _is_without_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Small kernels over one small image are computed as matrix products of their patches."""
    return (
        x.dtype == torch.float32
        and groups == 1
        and x.shape[0] == 1
        and x.numel() <= _LARGEST_WITHOUT_ONEDNN
        and (x.dim() < 4 or min(weight.shape[-2:]) <= 3)
    )


def _patches(weight: torch.Tensor, out: torch.Tensor) -> int:
    return math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * out.element_size()


def _strided_scratch(weight: torch.Tensor, stride: Sequence[int]) -> int:
    """Of the input's gradient where the kernel moves by several pixels: for each phase of the
    stride and each thread, by the output channels. At most: seen with 8 to 512 channels, strides
    to 4 and 4 threads."""
    n_phases = math.prod(stride)
    if n_phases == 1:
        return 0
    n_channels = min(128, max(32, _up_to_blocks(weight.shape[0])))
    n_threads = torch.get_num_threads()
    return 2048 * (n_phases - 1) * (n_threads + 1) + n_threads * (8216 + 512 * n_channels)


def _sums_of_threads(weight: torch.Tensor) -> int:
    """Of the weight's gradient where there are fewer blocks of channels than threads, which then
    share the images and have a sum each. At most: measured with 2 and 4 threads."""
    n_blocks = math.prod(_up_to_blocks(size) // _BLOCK for size in weight.shape[:2])
    n_sums = -(-torch.get_num_threads() // max(1, n_blocks // 2)) - 1
    of_bias = 2 * _up_to_blocks(weight.shape[0]) * weight.element_size()
    return n_sums * (_blocked(weight, 0) + of_bias) + 24704 if n_sums else 0


def _input(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered input, if it is reordered."""
    if not _is_read_in_place(x, weight, groups):
        return _blocked(x, 1)
    return 0 if x.shape[1] in _OF_IMAGES else plain_bytes(x)


def _weight(x: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    """Bytes of the reordered weight."""
    if groups != 1:
        return plain_bytes(weight)
    return _blocked(weight, 0) if _is_read_in_place(x, weight, groups) else _blocked(weight, 0, 1)


def _is_read_in_place(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Inputs of few channels are not padded, and images not reordered either."""
    return x.shape[1] < _BLOCK and groups == 1 and math.prod(weight.shape[2:]) > 1


def keeps_channels_last(x: torch.Tensor) -> bool:
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
