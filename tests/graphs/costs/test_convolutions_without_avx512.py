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
