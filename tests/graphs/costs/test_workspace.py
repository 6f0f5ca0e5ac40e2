"""The workspace of operators, estimated, against what the profiler sees."""

from __future__ import annotations

import pytest
import torch

from graphs.costs.models import Measured, OpCall, Roofline
from graphs.costs.workspace import cpu_workspace_bytes
from graphs.hardware import named
from tests.graphs.costs.test_costs import aten, attention_calls


def assert_estimated(call: OpCall, *, share: float = 0.0, extra_bytes: float = 0.0) -> None:
    """Near what is measured with AVX-512, which the figures are made for; never too low elsewhere,
    where oneDNN pads tensors less.

    share, extra_bytes: the tolerance, as a share of the measured bytes plus a constant.
    """
    estimated_bytes = cpu_workspace_bytes(call)
    measured_bytes = Measured("cpu", n_runs=1).cost(call).workspace_bytes
    within_bytes = share * measured_bytes + extra_bytes
    assert estimated_bytes >= measured_bytes - within_bytes
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert estimated_bytes <= measured_bytes + within_bytes


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize(
    ("n_in", "n_out", "size", "kernel", "stride"),
    [
        (3, 64, 64, 7, 2),
        (64, 64, 28, 1, 1),
        (64, 64, 28, 3, 1),
        (64, 128, 28, 3, 2),
        (32, 2, 64, 1, 1),
    ],
)
def test_workspace_of_convolutions_is_about_what_is_measured(
    batch: int, n_in: int, n_out: int, size: int, kernel: int, stride: int
) -> None:
    """Within a fifth of the bytes that the convolution handles."""
    x, weight = torch.randn(batch, n_in, size, size), torch.randn(n_out, n_in, kernel, kernel)
    options = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(x, weight, None, *options)
    forward = OpCall(aten.convolution.default, (x, weight, None, *options), {}, out)
    arguments = (out, x, weight, [0], *options, [n_in > 3, True, False])  # images need no gradient
    target = aten.convolution_backward.default
    backward = OpCall(target, arguments, {}, target(*arguments))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one thread small convolutions take another road, without copies
    try:
        for one in (forward, backward):
            handled = sum(t.numel() * 4 for t in [*one.inputs(), *one.outputs()])
            assert_estimated(one, extra_bytes=0.2 * handled)
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.slow(sample=5)
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "n_in", "n_out", "size", "kernel", "stride"),
    [
        (4, 16, 32, 8, 4, 2),
        (1, 3, 16, 8, 3, 1),
        (4, 3, 16, 16, 4, 2),
        (4, 8, 64, 4, 5, 1),
        (4, 20, 40, 16, 3, 1),
        (1, 3, 3, 4, 4, 2),
        (2, 16, 32, 8, 3, 3),
        (4, 64, 64, 16, 4, 2),
        (4, 32, 16, 16, 4, 2),
        (4, 3, 3, 4, 5, 2),
    ],
)
def test_workspace_of_small_convolutions_is_never_too_low(
    batch: int, n_in: int, n_out: int, size: int, kernel: int, stride: int, n_threads: int
) -> None:
    x, weight = torch.randn(batch, n_in, size, size), torch.randn(n_out, n_in, kernel, kernel)
    options = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        out = aten.convolution.default(x, weight, None, *options)
        calls = [OpCall(aten.convolution.default, (x, weight, None, *options), {}, out)]
        target = aten.convolution_backward.default
        for of_x in (True, False):
            arguments = (out, x, weight, [n_out], *options, [of_x, True, True])
            calls.append(OpCall(target, arguments, {}, target(*arguments)))
        for one in calls:
            measured_bytes = Measured("cpu", n_runs=1).cost(one).workspace_bytes
            assert cpu_workspace_bytes(one) >= measured_bytes
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_copy_what_is_a_part_of_a_concatenation(transposed: bool) -> None:
    """As much more is measured as is estimated, whatever else the convolution takes."""
    options = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)
    weight, out_mask = torch.randn(32, 32, 3, 3), [True, True, False]

    def workspaces(x: torch.Tensor, gradient: torch.Tensor) -> list[tuple[int, int]]:
        target = aten.convolution_backward.default
        arguments = (gradient, x, weight, [0], *options, out_mask)
        backward = OpCall(target, arguments, {}, target(*arguments))
        target, arguments = aten.convolution.default, (x, weight, None, *options)
        forward = OpCall(target, arguments, {}, target(*arguments))
        return [
            (cpu_workspace_bytes(one), Measured("cpu", n_runs=1).cost(one).workspace_bytes)
            for one in (forward, backward)
        ]

    whole, part = torch.randn(4, 32, 16, 16), torch.randn(4, 64, 16, 16)[:, 32:]
    n_bytes = whole.numel() * whole.element_size()
    for x, gradient, *copies in ((whole, part, 0, 1), (part, whole, 1, 1), (part, part, 1, 2)):
        pairs = zip(workspaces(x, gradient), workspaces(whole, whole), copies, strict=True)
        for found, plain, n_copies in pairs:
            assert [a - b for a, b in zip(found, plain, strict=True)] == [n_copies * n_bytes] * 2


@pytest.mark.parametrize("patch", [16, 32])
def test_workspace_of_patches_is_several_weights_for_each_thread(patch: int) -> None:
    x, weight = torch.randn(2, 3, 4 * patch, 4 * patch), torch.randn(64, 3, patch, patch)
    options = ([patch] * 2, [0, 0], [1, 1], False, [0, 0], 1)
    target = aten.convolution_backward.default
    arguments = (torch.randn(2, 64, 4, 4), x, weight, [64], *options, [False, True, True])
    call = OpCall(target, arguments, {}, target(*arguments))
    assert_estimated(call, share=0.01)


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("n_channels", [32, 100])
@pytest.mark.parametrize(("kernel", "depthwise"), [(3, True), (5, True), (7, True), (3, False)])
def test_workspace_of_convolutions_in_channels_last(
    kernel: int, depthwise: bool, n_channels: int
) -> None:
    """ConvNeXt's large depthwise kernels take far more than the tensors that they handle."""
    groups = n_channels if depthwise else 1
    x = torch.randn(4, n_channels, 16, 16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(n_channels, n_channels // groups, kernel, kernel)
    options = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    out = aten.convolution.default(x, weight, None, *options)
    forward = OpCall(aten.convolution.default, (x, weight, None, *options), {}, out)
    arguments = (out, x, weight, [n_channels], *options, [True, True, True])
    target = aten.convolution_backward.default
    backward = OpCall(target, arguments, {}, target(*arguments))
    for one in (forward, backward):
        assert_estimated(one, share=0.05, extra_bytes=20_000)  # by thread


def test_workspace_of_attention_is_a_tile_for_each_thread() -> None:
    forward, backward = attention_calls()
    assert Measured("cpu", n_runs=1).cost(forward).workspace_bytes == cpu_workspace_bytes(forward)
    measured = Measured("cpu", n_runs=1).cost(backward).workspace_bytes
    assert measured <= cpu_workspace_bytes(backward) + 1000


def test_workspace_is_the_cpus_only() -> None:
    forward, _ = attention_calls()
    assert Roofline(named("cpu")).cost(forward).workspace_bytes > 0
    assert Roofline(named("h100")).cost(forward).workspace_bytes == 0


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    ("n_images", "n_in", "n_out", "sizes"),
    [
        (8, 16, 16, (16, 16)),
        (16, 3, 1, (32, 32)),
        (2, 1, 100, (28, 28)),
        (8, 4, 16, (28,)),
        (8, 64, 2, (4, 4, 4)),
        (8, 4, 16, (27,)),  # small enough to be convolved
        (64, 512, 16, (4, 4)),
    ],
)
def test_workspace_of_kernels_that_cover_whole_images(
    n_images: int, n_in: int, n_out: int, sizes: tuple[int, ...], n_threads: int
) -> None:
    """As in gradients of a weight's gradient."""
    x, weight = torch.randn(n_images, n_in, *sizes), torch.randn(n_out, n_in, *sizes)
    n = len(sizes)
    args = (x, weight, None, [1] * n, [0] * n, [1] * n, False, [0] * n, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        call = OpCall(aten.convolution.default, args, {}, aten.convolution.default(*args))
        assert_estimated(call, share=0.5 if sizes == (27,) else 0.0)
    finally:
        torch.set_num_threads(before)
