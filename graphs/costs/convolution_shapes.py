"""Which convolutions oneDNN computes directly on the CPU, and what those take that it does not.

The others are matrix products of patches. Conditions follow the kernels' `init_conf` in oneDNN
(jit_uni_dw_conv_kernel_utils, jit_avx512_common_conv_kernel) and were measured, as the figures,
with torch 2.13 and AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphs.costs.operators import OpCall

BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512 (8 with AVX2, which takes no more)."""

OF_IMAGES = (1, 3)
"""Channels of inputs that are read as they lie."""

WIDEST_UNROLLED = 14
"""Columns of a convolution kernel; wider ones are computed as matrix products."""


def up_to_blocks(n_channels: int) -> int:
    return -(-n_channels // BLOCK) * BLOCK


def plain_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def n_threads() -> int:
    return torch.get_num_threads()


def is_depthwise(weight: torch.Tensor, groups: int) -> bool:
    return groups == weight.shape[0] and weight.shape[1] == 1


def is_computed_directly(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """The gradient of a depthwise weight: of kernels up to three columns without gaps, on images
    with as many rows as the kernel has, and those that the stride leaves out at the top."""
    kernel, sizes = weight.shape[2:], x.shape[2:]
    needed = kernel[0] + -padding[0] % stride[0]
    return (
        kernel[-1] <= 3
        and math.prod(kernel) > 1
        and all(step == 1 for step in dilation)
        and all(step <= max(1, size) for step, size in zip(stride, kernel, strict=True))
        and all(pad <= size // 2 for pad, size in zip(padding, kernel, strict=True))
        and (len(kernel) == 1 or sizes[0] >= needed)
    )


def weight_is_blocked(x: torch.Tensor, weight: torch.Tensor, call: OpCall) -> bool:
    """The gradient of a dense weight, which is made of blocks of channels, or of matrix products:
    of wide kernels; of those with gaps that are larger than the image with them, or move by several
    pixels, or read few channels; of those in three dimensions that are larger than the image; and
    where the padding is more than half of the kernel."""
    stride, padding, dilation = call.args[4:7]
    kernel, sizes = weight.shape[2:], x.shape[2:]
    if kernel[-1] > WIDEST_UNROLLED:
        return False
    groups: int = call.args[9]
    is_of_few = weight.shape[1] < BLOCK if groups == 1 else not has_group_blocks(weight, groups, 16)
    if is_of_few and any(k > size for k, size in zip(kernel, sizes, strict=True)):
        return False
    spans = [step * (k - 1) + 1 for k, step in zip(kernel, dilation, strict=True)]
    has_gaps = any(step > 1 for step in dilation)
    is_of_few = is_of_few and x.shape[1] not in OF_IMAGES
    if has_gaps and (is_of_few or any(step > 1 for step in stride)):
        return False
    n_rows = len(spans) - 1  # all dimensions but the columns
    is_tall = any(span > size for span, size in zip(spans[:n_rows], sizes[:n_rows], strict=True))
    if is_tall and (has_gaps or len(spans) == 3):
        return False
    return all(pad <= span // 2 for pad, span in zip(padding[:n_rows], spans[:n_rows], strict=True))


def has_group_blocks(weight: torch.Tensor, groups: int, n_channels: int) -> bool:
    """Whether the channels of each group, in and out, fill blocks of `n_channels`."""
    return weight.shape[1] % n_channels == 0 and weight.shape[0] // groups % n_channels == 0


def patches_bytes(weight: torch.Tensor, out: torch.Tensor) -> int:
    """The pixels of one image that the kernel meets at each place."""
    return math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * out.element_size()


def matrix_bytes(weight: torch.Tensor, gradient: torch.Tensor) -> int:
    """Of the weight's gradient as matrix products: per thread, four copies of the weight and the
    patches of one image."""
    return n_threads() * (4 * plain_bytes(weight) + patches_bytes(weight, gradient)) + 256


_LARGEST_WITHOUT_ONEDNN = 20480
"""Of a single image, by its first four sizes (`use_mkldnn` of ATen/native/Convolution.cpp)."""


def is_without_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Small kernels over one small image are computed as matrix products of their patches. Of a
    volume one slice of the width counts, so large ones are, too."""
    return (
        x.dtype == torch.float32
        and groups == 1
        and x.shape[0] == 1
        and math.prod(x.shape[:4]) <= _LARGEST_WITHOUT_ONEDNN
        and (x.dim() < 4 or min(weight.shape[-2:]) <= 3)
    )


_IMAGES_FOR_ONEDNN = 16


def is_product_of_images(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """On one thread, dense kernels of single pixels over few images are matrix products of the
    images as they lie (`use_mkldnn` of ATen/native/Convolution.cpp)."""
    moves = (*stride, *dilation)
    return (
        x.dtype == torch.float32
        and groups == 1
        and x.dim() <= 4
        and math.prod(weight.shape[2:]) == 1
        and all(step == 1 for step in moves)
        and not any(padding)
        and x.shape[0] < _IMAGES_FOR_ONEDNN
        and n_threads() == 1
    )
