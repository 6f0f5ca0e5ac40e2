"""Which convolutions oneDNN computes directly on the CPU, and the workspace of those it does not.

Convolutions that are not computed directly become matrix products of patches (im2col). Here "gaps"
are a dilation above 1. The conditions follow the kernels' `init_conf` in oneDNN
(jit_uni_dw_conv_kernel_utils, jit_avx512_common_conv_kernel); conditions and numbers were checked
by measuring with torch 2.13 and AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphs.costs.operators import OpCall

BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512 (8 with AVX2, which takes no more)."""

UNREORDERED_CHANNELS = (1, 3)
"""Numbers of input channels (grayscale, RGB) with which oneDNN reads images without reordering."""

WIDEST_UNROLLED = 14
"""The most columns of a kernel that is computed directly; wider ones become matrix products."""


def up_to_blocks(n_channels: int) -> int:
    """The number of channels rounded up to whole blocks."""
    return up_to_multiple(n_channels, BLOCK)


def up_to_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def plain_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements, without padding or gaps."""
    return tensor.numel() * tensor.element_size()


def n_threads() -> int:
    return torch.get_num_threads()


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_depthwise(weight: torch.Tensor, groups: int) -> bool:
    return groups == weight.shape[0] and weight.shape[1] == 1


def is_computed_directly(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether oneDNN computes the gradient of this depthwise weight directly.

    It does for kernels of at most three columns without gaps, on images that have at least as many
    rows as the kernel, plus the rows that the stride skips at the top.
    """
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
    """Whether the gradient of this weight (not depthwise) is computed in blocks of channels.

    It is computed as matrix products instead if the kernel is wide; if it has gaps and, with them,
    is larger than the image, or has a stride, or reads few channels; if it is three-dimensional and
    larger than the image; or if the padding is more than half of the kernel.

    call: the backward call, for its stride, padding, dilation and groups.
    """
    stride, padding, dilation = call.args[4:7]
    kernel, sizes = weight.shape[2:], x.shape[2:]
    if kernel[-1] > WIDEST_UNROLLED:
        return False
    groups: int = call.args[9]
    has_few_channels = (
        weight.shape[1] < BLOCK if groups == 1 else not has_group_blocks(weight, groups, 16)
    )
    if has_few_channels and any(k > size for k, size in zip(kernel, sizes, strict=True)):
        return False
    spans = [step * (k - 1) + 1 for k, step in zip(kernel, dilation, strict=True)]
    has_gaps = any(step > 1 for step in dilation)
    has_few_channels = has_few_channels and x.shape[1] not in UNREORDERED_CHANNELS
    if has_gaps and (has_few_channels or any(step > 1 for step in stride)):
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
    """Bytes of the patches of one image (im2col): for each output pixel, the inputs it reads."""
    return math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * out.element_size()


def matrix_bytes(weight: torch.Tensor, gradient: torch.Tensor) -> int:
    """Workspace of computing the weight's gradient as matrix products: per thread, four copies of
    the weight and the patches of one image."""
    return n_threads() * (4 * plain_bytes(weight) + patches_bytes(weight, gradient)) + 256


_LARGEST_WITHOUT_ONEDNN = 20480
"""The largest product of the first four sizes of an input, up to which PyTorch does not use oneDNN
(`use_mkldnn` of ATen/native/Convolution.cpp)."""


def is_without_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether PyTorch computes this convolution as a matrix product of patches, without oneDNN.

    It does so for small kernels on a batch of one small image. Of a volume only the first four
    sizes count, without the width, so this includes large volumes.
    """
    return (
        x.dtype == torch.float32
        and groups == 1
        and x.shape[0] == 1
        and math.prod(x.shape[:4]) <= _LARGEST_WITHOUT_ONEDNN
        and (x.dim() < 4 or min(weight.shape[-2:]) <= 3)
    )


_IMAGES_FOR_ONEDNN = 16
"""The smallest batch for which one thread runs 1 x 1 convolutions in oneDNN."""


def is_product_of_images(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether a 1 x 1 convolution runs as a matrix product of each image, without oneDNN.

    It does on one thread for small batches (`use_mkldnn` in ATen/native/Convolution.cpp), and then
    nothing is reordered. Groups are computed one by one, and concatenated.
    """
    steps = (*stride, *dilation)
    return (
        x.dtype == torch.float32
        and x.dim() <= 4
        and math.prod(weight.shape[2:]) == 1
        and all(step == 1 for step in steps)
        and not any(padding)
        and x.shape[0] < _IMAGES_FOR_ONEDNN
        and n_threads() == 1
    )
