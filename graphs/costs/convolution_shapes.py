"""A convolution on the CPU: whether oneDNN computes it directly, and its workspace if it does not.

Convolutions that are not computed directly become matrix products of patches (im2col). The
conditions follow the kernels' `init_conf` in oneDNN (jit_uni_dw_conv_kernel_utils,
jit_avx512_common_conv_kernel); conditions and numbers were checked by measuring with torch 2.13 and
AVX-512.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.costs.operators import OpCall, aten

BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512."""

UNREORDERED_CHANNELS = (1, 3)
"""Numbers of input channels (grayscale, RGB) with which oneDNN reads images without reordering."""

_LARGEST_WITHOUT_ONEDNN = 20480
"""The largest product of the first four sizes of an input, up to which PyTorch does not use oneDNN
(`use_mkldnn` of ATen/native/Convolution.cpp)."""

_LARGEST_CONVOLVED = 27
"""Pixels up to which oneDNN convolves images that the kernel covers."""

_IMAGES_FOR_ONEDNN = 16
"""The smallest batch for which one thread runs 1 x 1 convolutions in oneDNN."""


def block() -> int:
    """Channels per block of oneDNN's layouts on this machine."""
    return BLOCK if has_avx512() else BLOCK // 2


def up_to_blocks(n_channels: int) -> int:
    """The number of channels rounded up to whole blocks."""
    return up_to_multiple(n_channels, block())


def up_to_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def n_threads() -> int:
    return torch.get_num_threads()


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def cache_bytes() -> int:
    """Bytes of a core's own cache (L2), or a little more: about the most bytes of patches that a
    thread has at once without AVX-512 (measured with 512 KiB and 1 MiB; oneDNN fits them to it)."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # not in older releases
    return max(2**19, int(capabilities.get("l2_cache_size") or 0))


def widest_unrolled() -> int:
    """The widest kernel for which oneDNN computes the gradient of a weight directly; wider ones are
    computed as matrix products (measured)."""
    return 14 if has_avx512() else 13


@dataclass(frozen=True)
class Convolution:
    """A call of `aten.convolution` or `aten.convolution_backward`.

    out: the result, or its gradient in a backward call.
    mask: whether a backward call computes the gradients of input, weight and bias; () for a forward
        call.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    mask: Sequence[bool] = ()

    @classmethod
    def of(cls, call: OpCall) -> Convolution:
        if call.packet is aten.convolution_backward:
            out, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args
        else:
            x, weight, _, stride, padding, dilation, transposed, _, groups = call.args
            (out,), mask = call.outputs(), ()
        return cls(x, weight, out, stride, padding, dilation, transposed, groups, mask)

    def mirrored(self) -> Convolution:
        """For a transposed convolution: the ordinary one whose input gradient it computes. It reads
        what this one writes, with the same weight, so that their passes change places."""
        return dataclasses.replace(self, x=self.out, out=self.x, transposed=False)

    @property
    def kernel(self) -> torch.Size:
        return self.weight.shape[2:]

    @property
    def kernel_bytes(self) -> int:
        """Bytes of the kernel between one input and one output channel."""
        return math.prod(self.kernel) * self.weight.element_size()

    @property
    def group_channels(self) -> tuple[int, int]:
        """Channels of each group, in and out, as the weight has them."""
        return self.weight.shape[1], self.weight.shape[0] // self.groups

    @property
    def is_float32(self) -> bool:
        return self.x.dtype == torch.float32

    @property
    def is_1x1(self) -> bool:
        return math.prod(self.kernel) == 1

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.weight.shape[0] and self.weight.shape[1] == 1

    @property
    def is_strided(self) -> bool:
        return any(step > 1 for step in self.stride)

    @property
    def has_gaps(self) -> bool:
        """Whether a dilation is above 1."""
        return any(step > 1 for step in self.dilation)

    @property
    def patches_bytes(self) -> int:
        """Bytes of the patches of one image (im2col): for each output pixel, what it reads."""
        n_pixels = math.prod(self.out.shape[2:])
        return math.prod(self.weight.shape[1:]) * n_pixels * self.out.element_size()

    @property
    def slice_patches_bytes(self) -> int:
        """Bytes of the patches that a thread of oneDNN has at once: those of an image, or of one
        depth of a volume's output."""
        is_volume = len(self.kernel) == 3
        return self.patches_bytes // self.out.shape[2] if is_volume else self.patches_bytes

    @property
    def matrix_bytes(self) -> int:
        """Workspace of computing the weight's gradient as matrix products: per thread, four copies
        of the weight and the patches of an image or of one depth of a volume."""
        return n_threads() * (4 * self.weight.nbytes + self.slice_patches_bytes) + 256

    @property
    def batch_patches_bytes(self) -> int:
        """Bytes of the patches of all images of a group; 0 if the images are the patches."""
        return 0 if self.images_are_patches() else self.x.shape[0] * self.patches_bytes

    def images_are_patches(self) -> bool:
        return self.is_1x1 and not (self.is_strided or any(self.padding))

    def fills_blocks(self, n_channels: int) -> bool:
        """Whether the channels of each group, in and out, fill blocks of `n_channels`."""
        return all(n % n_channels == 0 for n in self.group_channels)

    def computes_depthwise_directly(self) -> bool:
        """Whether oneDNN computes the gradient of this depthwise weight directly.

        It does for kernels of at most three columns without gaps, on images that have at least as
        many rows as the kernel, plus the rows that the stride skips at the top.
        """
        kernel, sizes = self.kernel, self.x.shape[2:]
        needed = kernel[0] + -self.padding[0] % self.stride[0]
        return (
            kernel[-1] <= 3
            and not self.is_1x1
            and not self.has_gaps
            and all(step <= max(1, size) for step, size in zip(self.stride, kernel, strict=True))
            and all(pad <= size // 2 for pad, size in zip(self.padding, kernel, strict=True))
            and (len(kernel) == 1 or sizes[0] >= needed)
        )

    def computes_in_blocks(self) -> bool:
        """Whether the gradient of this weight (not depthwise) is computed in blocks of channels.

        It is computed as matrix products instead if the kernel is wide; if it has gaps and, with
        them, is larger than the image, or has a stride, or reads few channels; if it is
        three-dimensional and larger than the image; or if the padding is more than half of the
        kernel. Without AVX-512 it is computed so only without gaps, on images of at least as many
        rows as the kernel, and on volumes that are not padded in depth (measured with AVX2: kernels
        of 2 to 5, dilations to 3, images of 2 to 16 pixels).
        """
        kernel, sizes = self.kernel, self.x.shape[2:]
        if kernel[-1] > widest_unrolled():
            return False
        is_grouped = self.groups > 1
        has_few_channels = (
            not self.fills_blocks(block()) if is_grouped else self.weight.shape[1] < block()
        )
        if has_few_channels and any(k > size for k, size in zip(kernel, sizes, strict=True)):
            return False
        has_few_channels = has_few_channels and self.x.shape[1] not in UNREORDERED_CHANNELS
        if self.has_gaps and (has_few_channels or self.is_strided):
            return False
        spans = [step * (k - 1) + 1 for k, step in zip(kernel, self.dilation, strict=True)]
        rows = slice(len(spans) - 1)  # all dimensions but the columns
        is_tall = any(span > size for span, size in zip(spans[rows], sizes[rows], strict=True))
        is_volume = len(spans) == 3 and not self.is_1x1
        if has_avx512():
            is_product = is_tall and (self.has_gaps or is_volume)
        else:
            is_product = is_tall or self.has_gaps or self.is_volume_without_avx512()
        if is_product:
            return False
        pairs = zip(self.padding[rows], spans[rows], strict=True)
        return all(pad <= span // 2 for pad, span in pairs)

    def is_volume_without_avx512(self) -> bool:
        """Whether oneDNN has only matrix products for the gradient of this weight, because it is
        three-dimensional and the machine has no AVX-512. Kernels of one voxel, and those without
        gaps on volumes that are not padded in depth, are computed in blocks of channels all the
        same (measured with AVX2, 1 to 64 channels)."""
        is_volume = len(self.kernel) == 3 and not self.is_1x1
        return is_volume and not has_avx512() and (self.has_gaps or self.padding[0] > 0)

    def is_without_onednn(self) -> bool:
        """Whether PyTorch computes this convolution as a matrix product of patches, without oneDNN.

        It does so for small kernels on a batch of one small image. Of a volume only the first four
        sizes count, without the width, so this includes large volumes.
        """
        return (
            self.is_float32
            and self.groups == 1
            and self.x.shape[0] == 1
            and math.prod(self.x.shape[:4]) <= _LARGEST_WITHOUT_ONEDNN
            and (self.x.dim() < 4 or min(self.kernel[-2:]) <= 3)
        )

    def is_inner_product(self) -> bool:
        """Whether oneDNN computes this convolution as an inner product of images and weight.

        It does with AVX-512 if the kernel covers several whole images, of more than 27 pixels each,
        as in gradients of a weight's gradient (measured; the limit is that of `ip_convolution`).
        """
        return (
            has_avx512()
            and self.is_float32
            and self.groups == 1
            and self.kernel == self.x.shape[2:]
            and math.prod(self.kernel) > _LARGEST_CONVOLVED
            and self.x.shape[0] > 1
            and not (self.transposed or self.has_gaps or any(self.padding))
        )

    def is_computed_by_group(self) -> bool:
        """Whether PyTorch computes the groups of this convolution one by one, each as a matrix
        product of patches. It does for 16-bit dtypes without AVX-512, since oneDNN then has no such
        convolution."""
        is_ordinary = self.x.dim() <= 4 and not (self.has_gaps or self.transposed)
        is_half = self.x.dtype in (torch.bfloat16, torch.float16)
        return is_half and is_ordinary and not has_avx512()

    def is_volume_of_thin_kernels(self) -> bool:
        """Whether a convolution of volumes whose kernel has one row and one column (those over time
        of R(2+1)D) runs without oneDNN, as matrix products of the patches of the whole batch.

        It does on one thread for small batches, as `is_product_of_images`.
        """
        return (
            self.is_float32
            and self.x.dim() == 5
            and math.prod(self.kernel[-2:]) == 1
            and not (self.is_strided or self.has_gaps or self.transposed)
            and self.x.shape[0] < _IMAGES_FOR_ONEDNN
            and n_threads() == 1
        )

    def is_product_of_images(self) -> bool:
        """Whether a 1 x 1 convolution runs as a matrix product of each image, without oneDNN.

        It does on one thread for small batches (`use_mkldnn` in ATen/native/Convolution.cpp), and
        then nothing is reordered. Groups are computed one by one, and concatenated.
        """
        return (
            self.is_float32
            and self.x.dim() <= 4
            and self.is_1x1
            and not (self.is_strided or self.has_gaps or any(self.padding))
            and self.x.shape[0] < _IMAGES_FOR_ONEDNN
            and n_threads() == 1
        )
