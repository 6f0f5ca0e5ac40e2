"""The workspace of convolutions that run in another way on machines without AVX-512."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs.costs import cpu_peak_bytes
from graphs.costs.operators import OpCall, aten
from graphs.costs.workspace import cpu_workspace_bytes

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX512",
    reason="with AVX-512, oneDNN computes these convolutions in another way",
)


def _measured_and_estimated(target: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    call = OpCall(target, args, {}, target(*args))
    with torch.no_grad():
        peak_bytes = cpu_peak_bytes(lambda: target(*args)).peak_bytes
    return peak_bytes - call.made_bytes(), cpu_workspace_bytes(call)


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 4), (8, 4), (16, 16), (24, 24)])
@pytest.mark.parametrize("size", [(16, 16, 16), (8, 6, 10), (2, 8, 8)])
def test_the_gradient_of_a_volumes_weight_takes_the_patches_of_one_depth(
    n_in: int, n_out: int, size: tuple[int, int, int]
) -> None:
    """As in three-dimensional U-Nets."""
    x, weight = torch.randn(2, n_in, *size), torch.randn(n_out, n_in, 3, 3, 3)
    options = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    args = (torch.randn(2, n_out, *size), x, weight, [n_out], *options, [False, True, False])
    measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
    assert measured <= estimated <= 1.02 * measured


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (4, 4)])
@pytest.mark.parametrize("n_out", [4, 16, 64])
def test_the_first_convolution_of_images_with_one_channel(
    n_out: int, kernel: int, stride: int
) -> None:
    """Such as spectrograms: the images are padded to eight channels, those of three are not."""
    for n_in in (1, 3):
        x, weight = torch.randn(4, n_in, 40, 40), torch.randn(n_out, n_in, kernel, kernel)
        options = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        gradient = aten.convolution.default(x, weight, None, *options)
        args = (gradient, x, weight, [n_out], *options, [False, True, True])
        measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
        assert measured <= estimated, n_in
        if n_out >= 16:  # fewer are estimated as a block of 16
            assert estimated <= 1.02 * measured, n_in


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_in_16_bits_the_patches_of_the_whole_batch_exist(
    kernel: int, stride: int, groups: int, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x = torch.randn(4, 16, 12, 12, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(32, 16 // groups, kernel, kernel, dtype=dtype)
    options = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    target: Any = aten.convolution.default
    gradient = target(x, weight, None, *options)
    measured, estimated = _measured_and_estimated(target, (x, weight, None, *options))
    assert measured <= estimated <= 1.02 * measured + 512
    for mask in ([True, True, True], [False, True, False], [True, False, False]):
        args = (gradient, x, weight, [32], *options, mask)
        measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
        assert measured <= estimated <= 1.02 * measured + 512, mask


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 1), (16, 8), (5, 24)])
def test_transposed_convolutions_take_what_the_mirrored_ones_take(
    n_in: int, n_out: int, kernel: int, stride: int, dims: int
) -> None:
    """As in decoders: of ConvTasNet (one channel), of U-Nets."""
    x, weight = torch.randn(4, n_in, *[6] * dims), torch.randn(n_in, n_out, *[kernel] * dims)
    options = ([stride] * dims, [0] * dims, [1] * dims, True, [0] * dims, 1)
    target: Any = aten.convolution.default
    gradient = target(x, weight, None, *options)
    measured, estimated = _measured_and_estimated(target, (x, weight, None, *options))
    assert measured <= estimated <= 1.02 * measured + 1024
    for mask in ([True, True, True], [False, True, False], [True, False, False]):
        args = (gradient, x, weight, [n_out], *options, mask)
        measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
        assert measured <= estimated <= 1.02 * measured + 2048, mask


def test_a_small_transposed_convolution_of_one_image_takes_its_patches() -> None:
    x, weight = torch.randn(1, 8, 12, 12), torch.randn(8, 16, 3, 3)
    options = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    target: Any = aten.convolution.default
    measured, estimated = _measured_and_estimated(target, (x, weight, None, *options))
    assert measured == estimated == 16 * 9 * 144 * 4
    args = (target(x, weight, None, *options), x, weight, [16], *options, [True, True, False])
    measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
    assert measured == estimated == 16 * 9 * 144 * 4


@pytest.mark.parametrize(("kernel", "padding"), [(9, 4), (7, 4), (11, 5), (7, 3)])
def test_columns_padded_by_more_than_three_are_matrix_products(kernel: int, padding: int) -> None:
    x, weight = torch.randn(2, 16, 20, 20), torch.randn(16, 16, kernel, kernel)
    options = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)
    measured, estimated = _measured_and_estimated(
        aten.convolution.default, (x, weight, None, *options)
    )
    assert measured <= estimated <= 1.5 * measured


@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 1, 1), (1, 0, 0)])
def test_a_volume_without_padding_in_depth_is_computed_in_blocks(padding: tuple[int, ...]) -> None:
    x, weight = torch.randn(2, 8, 8, 8, 8), torch.randn(16, 8, 3, 3, 3)
    options = ([1] * 3, list(padding), [1] * 3, False, [0] * 3, 1)
    gradient = aten.convolution.default(x, weight, None, *options)
    args = (gradient, x, weight, [16], *options, [False, True, False])
    measured, estimated = _measured_and_estimated(aten.convolution_backward.default, args)
    assert measured <= estimated <= 1.02 * measured
