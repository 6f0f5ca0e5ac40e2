"""Workspace of operators on a card, counted by hand."""

from __future__ import annotations

import pytest
import torch

from graphs.costs import OpCall, Roofline
from graphs.hardware import named

aten = torch.ops.aten
CARD = Roofline(named("h100"))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def backward_of_attention(query: torch.Tensor, key: torch.Tensor) -> OpCall:
    row_sums = meta(*query.shape[:-1], dtype=torch.float32)
    args = (query, query, key, key, query, row_sums, 0.0, True)
    gradients = tuple(torch.empty_like(each) for each in (query, key, key))
    target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return OpCall(target, args, {}, gradients)


def test_flash_attention_sums_the_gradient_of_queries_in_float32():
    query = meta(2, 3, 100, 40)  # 128 queries of 64 numbers after rounding
    call = backward_of_attention(query, query)
    assert CARD.cost(call).workspace_bytes == 4 * 2 * 3 * 128 * (64 + 1)


def test_shared_keys_get_gradients_for_each_head_first():
    alone = backward_of_attention(meta(2, 4, 128, 32), meta(2, 4, 128, 32))
    shared = backward_of_attention(meta(2, 4, 128, 32), meta(2, 1, 128, 32))
    more = CARD.cost(shared).workspace_bytes - CARD.cost(alone).workspace_bytes
    assert more == 2 * (2 * 4 * 128 * 32) * 2


def test_attention_in_float32_needs_row_sums_alone():
    query = meta(2, 3, 128, 32, dtype=torch.float32)
    assert CARD.cost(backward_of_attention(query, query)).workspace_bytes == 4 * 2 * 3 * 128


@pytest.mark.parametrize(
    ("n_indices", "n_rows", "expected"),
    [
        (3072, 50, 0),
        (5000, 50, 8 * (2 * 5000 + 3 * 50 + 550) + 550 * 4 * 16),
        (5000, 9999, 8 * (2 * 5000 + 3 * 5000 + 5500) + 5500 * 4 * 16),
    ],
)
def test_the_gradient_of_an_embedding_sorts_its_indices(n_indices, n_rows, expected):
    gradient, indices = meta(n_indices, 16), meta(n_indices, dtype=torch.int64)
    target, args = aten.embedding_dense_backward.default, (gradient, indices, n_rows, -1, False)
    call = OpCall(target, args, {}, meta(n_rows, 16))
    assert CARD.cost(call).workspace_bytes == expected


def test_group_norm_keeps_figures_of_channels_and_groups():
    n, c, pixels, groups = 3, 8, 10, 2
    x, figures, weight = meta(n, c, pixels), meta(n, groups), meta(c)
    forward = OpCall(
        aten.native_group_norm.default,
        (x, weight, weight, n, c, pixels, groups, 1e-5),
        {},
        (torch.empty_like(x), figures, figures),
    )
    assert CARD.cost(forward).workspace_bytes == 4 * 2 * n * c
    for given, per_channel in ((weight, 3), (None, 2)):
        args = (x, x, figures, figures, given, n, c, pixels, groups, [True, True, True])
        made = (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight))
        backward = OpCall(aten.native_group_norm_backward.default, args, {}, made)
        expected = 4 * n * (per_channel * c + 2 * groups)
        assert CARD.cost(backward).workspace_bytes == expected


@pytest.mark.parametrize(
    ("n_rows", "width", "n_sums"),
    [(65_536, 768, 0), (65_537, 32, 2049), (131_072, 768, 2**15 // 24), (131_072, 4096, 0)],
)
def test_many_short_rows_of_a_norm_are_summed_in_parts(n_rows, width, n_sums):
    x, figures, weight = meta(n_rows, width), meta(n_rows, 1), meta(width, dtype=torch.float32)
    made = [torch.empty_like(each) for each in (x, weight, weight)]
    of_layer = (x, x, [width], figures, figures, weight, weight, [True] * 3)
    backward = OpCall(aten.native_layer_norm_backward.default, of_layer, {}, tuple(made))
    assert CARD.cost(backward).workspace_bytes == 2 * n_sums * width * 4
    of_weight = (x, x, [width], figures, weight, [False, True])
    backward = OpCall(aten._fused_rms_norm_backward.default, of_weight, {}, (None, made[1]))
    assert CARD.cost(backward).workspace_bytes == n_sums * width * 4


def test_the_cpu_has_its_own_estimates():
    query = meta(2, 3, 100, 40)
    call = backward_of_attention(query, query)
    on_cpu = Roofline(named("cpu")).cost(call).workspace_bytes
    assert on_cpu != CARD.cost(call).workspace_bytes
    product = OpCall(aten.mm.default, (meta(4, 4), meta(4, 4)), {}, meta(4, 4))
    assert CARD.cost(product).workspace_bytes == 0


def _bytes_on_card(target: object, *args: object, made: tuple[torch.Tensor, ...]) -> int:
    return CARD.cost(OpCall(target, args, {}, made)).workspace_bytes


def test_norms_and_softmax_copy_what_is_not_in_order():
    x = meta(4, 8, 8, 32)
    turned, n_bytes = meta(4, 32, 8, 8).permute(0, 2, 3, 1), 2 * 4 * 8 * 8 * 32
    figures, weight = meta(4, 8, 8, 1), meta(32)
    of_softmax, of_log = aten._softmax.default, aten._log_softmax_backward_data.default
    for given, n_copies in ((x, 0), (turned, 1)):
        made = (torch.empty_like(x), figures, figures)
        target, args = aten.native_layer_norm.default, (given, [32], weight, weight, 1e-5)
        assert _bytes_on_card(target, *args, made=made) == n_copies * n_bytes
        target = aten._fused_rms_norm.default
        assert _bytes_on_card(target, given, [32], weight, 1e-5, made=made[:2]) == (
            n_copies * n_bytes
        )
        assert _bytes_on_card(of_softmax, given, -1, False, made=made[:1]) == n_copies * n_bytes
        found = _bytes_on_card(of_log, given, given, -1, torch.bfloat16, made=made[:1])
        assert found == 2 * n_copies * n_bytes
        target = aten.native_layer_norm_backward.default
        args = (x, given, [32], figures, figures, weight, weight, [True] * 3)
        assert _bytes_on_card(target, *args, made=made) == n_copies * n_bytes


def test_pools_copy_what_is_neither_in_order_nor_in_channels_last():
    shape, pooled = (2, 8, 6, 10), (2, 8, 3, 5)
    n_bytes, n_pooled = 2 * 2 * 8 * 6 * 10, 2 * 8 * 3 * 5
    last = torch.channels_last
    forward, backward = aten.avg_pool2d.default, aten.max_pool2d_with_indices_backward.default
    gradient, indices = meta(*pooled), meta(*pooled, dtype=torch.int64)
    for x, of_x, of_pooled in (
        (meta(*shape), 0, 0),
        (meta(*shape).contiguous(memory_format=last), 0, n_pooled * (2 + 8)),
        (meta(2, 16, 6, 10)[:, 8:], n_bytes, 0),
        (meta(2, 6, 10, 16)[..., 8:].permute(0, 3, 1, 2), n_bytes, n_pooled * (2 + 8)),
    ):
        assert _bytes_on_card(forward, x, [2, 2], [2, 2], made=(gradient,)) == of_x
        args = (gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
        made = (torch.empty_like(x),)
        assert _bytes_on_card(backward, *args, made=made) == of_x + of_pooled


def test_rolls_keep_the_results_of_all_dimensions_but_the_last():
    x, turned, n_bytes = meta(4, 6), meta(6, 4).t(), 2 * 4 * 6
    target = aten.roll.default
    assert _bytes_on_card(target, x, [1], [0], made=(x.clone(),)) == 0
    assert _bytes_on_card(target, turned, [1], [0], made=(x.clone(),)) == n_bytes
    assert _bytes_on_card(target, x, [1, 1], [0, 1], made=(x.clone(),)) == n_bytes
