"""Kernels that copy inputs which lie otherwise than they are read: estimated against measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.costs import cpu_peak_bytes
from graphs.costs.layouts import suggested_format
from graphs.costs.operators import OpCall, aten
from graphs.costs.workspace import cpu_workspace_bytes
from graphs.trace import trace
from scheduler_runtime.measuring import measure
from tests.support.budgets import baseline_peak_bytes

N, C, H, W = 2, 16, 24, 20


def _layouts(*shape: int) -> dict[str, torch.Tensor]:
    """Tensors of this shape: images, or volumes."""
    n, c, *sizes = shape
    last = (*range(2, len(shape)), 1)  # the order of dimensions in channels last
    back = (0, len(shape) - 1, *range(1, len(shape) - 1))
    plain = torch.randn(shape)
    return {
        "in order": plain,
        "channels last": plain.permute(0, *last).contiguous().permute(back),
        "transposed": torch.randn(n, c, *sizes[::-1]).permute(0, 1, *range(len(shape) - 1, 1, -1)),
        "some channels": torch.randn(n, 2 * c, *sizes)[:, c:],
        "some channels last": torch.randn(n, *sizes, 2 * c)[..., c:].permute(back),
        "every other column": torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
        "one number": torch.ones(()).expand(shape),
        "one column": torch.randn(*shape[:-1], 1).expand(shape),
    }


def _assert_estimated(target: Any, *args: Any, **kwargs: Any) -> None:
    run: Callable[[], Any] = lambda: target(*args, **kwargs)  # noqa: E731
    call = OpCall(target, args, kwargs, run())
    with torch.no_grad():
        measured = cpu_peak_bytes(run).peak_bytes - call.made_bytes()
    assert abs(cpu_workspace_bytes(call) - measured) <= 300


Arguments = Callable[[torch.Tensor], tuple[Any, ...]]
IN_ORDER = (W,), torch.ones(2 * W)[::2], torch.ones(W), 1e-5

FORWARD: dict[str, Arguments] = {
    "native_layer_norm": lambda x: (x, *IN_ORDER),
    "_softmax": lambda x: (x, 1, False),
    "_log_softmax": lambda x: (x, -1, False),
    "_safe_softmax": lambda x: (x, -1),
    "avg_pool2d": lambda x: (x, [3, 3], [2, 2], [1, 1]),
    "max_pool2d_with_indices": lambda x: (x, [3, 3], [2, 2], [1, 1]),
    "_adaptive_avg_pool2d": lambda x: (x, [4, 4]),
    "adaptive_max_pool2d": lambda x: (x, [4, 4]),
    "fractional_max_pool2d": lambda x: (x, [2, 2], [4, 4], torch.full((N, C, 2), 0.5)),
    "pixel_shuffle": lambda x: (x, 2),
    "pixel_unshuffle": lambda x: (x, 2),
    "channel_shuffle": lambda x: (x, 4),
    "reflection_pad2d": lambda x: (x, [1] * 4),
    "replication_pad2d": lambda x: (x, [1] * 4),
    "upsample_nearest2d": lambda x: (x, [40, 40]),
    "roll": lambda x: (x, [1, 1, 1], [1, 2, 3]),
    "_cdist_forward": lambda x: (x, x, 2.0, None),
}
ONCE: dict[str, tuple[Any, Arguments]] = {
    "roll along a dimension": (aten.roll.default, lambda x: (x, [1], [2])),
    "roll of all numbers": (aten.roll.default, lambda x: (x, [1], [])),
    "second dimension": (aten.index_select.default, lambda x: (x, 1, torch.arange(4))),
    "third dimension": (aten.index_select.default, lambda x: (x, 2, torch.arange(4))),
    "distances by a product": (aten._cdist_forward.default, lambda x: (x, x, 2.0, 1)),
    "cross-entropy": (
        aten.nll_loss2d_forward.default,
        lambda x: (x, torch.zeros(N, H, W, dtype=torch.long), None, 1, -100),
    ),
}


@pytest.mark.parametrize("name", [*FORWARD, *ONCE])
def test_inputs_are_copied_into_the_layout_that_is_read(name: str) -> None:
    default = getattr(getattr(aten, name, None), "default", None)
    target, arguments = ONCE[name] if name in ONCE else (default, FORWARD[name])
    for x in _layouts(N, C, H, W).values():
        _assert_estimated(target, *arguments(x))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("avg_pool3d", ([2] * 3,)),
        ("max_pool3d_with_indices", ([2] * 3,)),
        ("_adaptive_avg_pool3d", ([3] * 3,)),
        ("reflection_pad3d", ([1] * 6,)),
        ("replication_pad3d", ([1] * 6,)),
    ],
)
def test_volumes_are_copied_into_the_layout_that_is_read(name: str, arguments: Any) -> None:
    for x in _layouts(2, 8, 6, 8, 10).values():
        _assert_estimated(getattr(aten, name).default, x, *arguments)


Gradients = Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]
POOL = [3, 3], [2, 2], [1, 1]
MOMENTS = torch.zeros(N, C, H, 1)
POOLED, SAME, PADDED = (N, C, H // 2, W // 2), (N, C, H, W), (N, C, H + 2, W + 2)
DOUBLED = (N, C, 2 * H, 2 * W)

BACKWARD: dict[str, tuple[tuple[int, ...], Gradients]] = {
    "native_layer_norm_backward": (
        SAME,
        lambda g, x: (g, x, [W], MOMENTS, MOMENTS, torch.ones(W), torch.ones(W), [True] * 3),
    ),
    "_softmax_backward_data": (SAME, lambda g, x: (g, x, 1, torch.float32)),
    "_log_softmax_backward_data": (SAME, lambda g, x: (g, x, -1, torch.float32)),
    "gelu_backward": (SAME, lambda g, x: (g, x)),
    "avg_pool2d_backward": (POOLED, lambda g, x: (g, x, *POOL, False, True, None)),
    "max_pool2d_with_indices_backward": (
        POOLED,
        lambda g, x: (
            *(g, x, *POOL, [1, 1], False),
            aten.max_pool2d_with_indices.default(x, *POOL)[1],
        ),
    ),
    "_adaptive_avg_pool2d_backward": (POOLED, lambda g, x: (g, x)),
    "adaptive_max_pool2d_backward": (
        POOLED,
        lambda g, x: (g, x, aten.adaptive_max_pool2d.default(x, POOLED[2:])[1]),
    ),
    "reflection_pad2d_backward": (PADDED, lambda g, x: (g, x, [1] * 4)),
    "replication_pad2d_backward": (PADDED, lambda g, x: (g, x, [1] * 4)),
    "upsample_nearest2d_backward": (DOUBLED, lambda g, x: (g, DOUBLED[2:], x.shape)),
    "upsample_bilinear2d_backward": (DOUBLED, lambda g, x: (g, DOUBLED[2:], x.shape, False)),
    "upsample_bicubic2d_backward": (DOUBLED, lambda g, x: (g, DOUBLED[2:], x.shape, False)),
    "grid_sampler_2d_backward": (
        (N, C, 8, 8),
        lambda g, x: (g, x, torch.zeros(N, 8, 8, 2), 0, 0, False, [True, True]),
    ),
    "embedding_dense_backward": (
        SAME,
        lambda g, x: (g, torch.zeros(N, C, H, dtype=torch.long), 50, -1, False),
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_copied_into_the_layout_that_is_read(name: str) -> None:
    shape, arguments = BACKWARD[name]
    for gradient in _layouts(*shape).values():
        for x in _layouts(*SAME).values():
            _assert_estimated(getattr(aten, name).default, *arguments(gradient, x))


def test_gradients_of_volumes_are_copied_into_the_layout_that_is_read() -> None:
    shape, pooled, kernel = (2, 8, 6, 8, 10), (2, 8, 3, 4, 5), [[2] * 3, [2] * 3, [0] * 3]
    for x in _layouts(*shape).values():
        indices = aten.max_pool3d_with_indices.default(x, *kernel)[1]
        for gradient in _layouts(*pooled).values():
            rest = (*kernel, [1] * 3, False, indices)
            _assert_estimated(aten.max_pool3d_with_indices_backward.default, gradient, x, *rest)
            rest = (*kernel, False, True, None)
            _assert_estimated(aten.avg_pool3d_backward.default, gradient, x, *rest)


def test_the_order_of_strides_decides_the_layout() -> None:
    layouts = _layouts(N, C, H, W)
    found = {name for name, x in layouts.items() if suggested_format(x) == torch.channels_last}
    assert found == {"channels last", "some channels last"}
    assert suggested_format(torch.randn(2, 16, 1, 1)) == torch.contiguous_format
    assert suggested_format(torch.randn(2, 1, 4, 4)) == torch.contiguous_format
    volumes = _layouts(2, 4, 3, 4, 5)
    assert suggested_format(volumes["some channels last"]) == torch.channels_last_3d


class OverPixels(nn.Module):
    """timm's LayerNorm2d: a norm over the channels of an image in order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 1), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).mean()


def test_the_peak_of_a_step_knows_the_copy_of_a_permuted_input() -> None:
    model, x = OverPixels(), torch.randn(4, 3, 32, 32)
    graph = trace(model, x)
    assert abs(measure(model, x).peak_bytes - baseline_peak_bytes(graph)) < 2000
