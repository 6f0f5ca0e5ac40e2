"""Cost models: FLOPs and bytes by hand, and seconds by the roofline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from graphs.costs.models import (
    DISPATCH_S,
    Cost,
    Measured,
    OpCall,
    Roofline,
    bytes_moved,
    flops_of,
    from_description,
)
from graphs.costs.operators import FLOPS
from graphs.hardware import DEVICES, named

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    """The call on tensors of these shapes; it is run on fakes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = tuple(
            torch.empty(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        )
        return OpCall(target, args, kwargs, target(*args, **kwargs))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_calls(key_heads: int = 4) -> tuple[OpCall, OpCall]:
    """2 sequences, 4 heads, 100 queries and keys of width 16, forward and backward."""
    query, key = empty(2, 4, 100, 16), empty(2, key_heads, 100, 16)
    forward = call(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, key)
    out, logsumexp = forward.value
    backward = call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(out, query, key, key, out, logsumexp, 0.0, False),
    )
    return forward, backward


# ---- FLOPs -------------------------------------------------------------------------------------


def test_flops_of_products_by_hand() -> None:
    assert flops_of(call(aten.mm.default, empty(30, 40), empty(40, 50))) == 2 * 30 * 40 * 50
    bias = empty(50)
    assert flops_of(call(aten.addmm.default, bias, empty(30, 40), empty(40, 50))) == 120_000
    assert flops_of(call(aten.bmm.default, empty(3, 5, 7), empty(3, 7, 9))) == 2 * 3 * 5 * 7 * 9
    assert flops_of(call(aten.add.Tensor, empty(30, 40), empty(30, 40))) == 0


def test_flops_of_convolutions_by_hand() -> None:
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0])
    x, weight = empty(2, 8, 10, 10), empty(16, 8, 3, 3)
    one_way = 2 * (2 * 10 * 10 * 16) * (8 * 3 * 3)
    assert flops_of(call(aten.convolution.default, x, weight, *options, 1)) == one_way
    gradient = empty(2, 16, 10, 10)
    arguments = ([0], *options[1:], 1, [True, True, False])
    backward = call(aten.convolution_backward.default, gradient, x, weight, *arguments)
    assert flops_of(backward) == 2 * one_way
    grouped = call(aten.convolution.default, x, empty(16, 2, 3, 3), *options, 4)
    assert flops_of(grouped) == one_way // 4


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_on_the_cpu_is_not_free(key_heads: int) -> None:
    """Two products forward and five backward; grouped keys are read by several heads."""
    product = 2 * (2 * 4) * 100 * 100 * 16
    forward, backward = attention_calls(key_heads)
    assert flops_of(forward) == 2 * product
    assert flops_of(backward) == 5 * product


def test_every_attention_that_trains_is_known() -> None:
    registered = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    names = {
        name.removeprefix("aten::")
        for name in registered
        if name.startswith("aten::_scaled_dot_product") or "_attention_forward" in name
    }
    inference = {"_flash_attention_forward_no_dropout_inplace"}
    inference |= {"_cudnn_attention_forward_no_dropout_inplace"} & names  # from torch 2.15 on
    traced_through = {"_scaled_dot_product_attention_math"}  # what it consists of is seen instead
    below_autograd = {"_cudnn_attention_forward"}
    unknown = {n for n in names if getattr(aten, n) not in {*FLOPS, *flop_registry}}
    assert unknown == inference | traced_through | below_autograd


def test_our_formulas_agree_with_torch_where_it_has_one() -> None:
    query, key, value = (2, 4, 100, 16), (2, 4, 70, 16), (2, 4, 70, 24)
    forward = FLOPS[aten._scaled_dot_product_flash_attention]
    assert forward(query, key, value) == sdpa_flop_count(query, key, value)
    backward = FLOPS[aten._scaled_dot_product_flash_attention_backward]
    gradient = (2, 4, 100, 24)
    expected = sdpa_backward_flop_count(gradient, query, key, value)
    assert backward(gradient, query, key, value) == expected


def test_rnns_and_grouped_products_by_hand() -> None:
    weights = [(400, 50), (400, 100), (400,), (400,)]
    assert FLOPS[aten._cudnn_rnn]((7, 3, 50), weights) == 2 * 7 * 3 * (400 * 50 + 400 * 100)
    assert FLOPS[aten._cudnn_rnn_backward]((7, 3, 50), weights) == 2 * 2 * 7 * 3 * 60_000
    grouped = FLOPS[aten._grouped_mm]
    assert grouped((90, 20), (3, 20, 30), out_shape=(90, 30)) == 2 * 90 * 20 * 30
    assert grouped((20, 90), (90, 30), out_shape=(3, 20, 30)) == 2 * 90 * 20 * 30


def test_the_table_is_one_for_torch_to_count_with() -> None:
    q = torch.randn(2, 4, 10, 16, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=dict(FLOPS)) as counter:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * (2 * 4) * 10 * 10 * 16


# ---- bytes -------------------------------------------------------------------------------------


def test_bytes_are_those_read_and_written() -> None:
    x = empty(30, 40)
    assert bytes_moved(call(aten.mm.default, x, empty(40, 50))) == 4 * (1200 + 2000 + 1500)
    assert bytes_moved(call(aten.relu.default, x)) == 2 * 4800
    assert bytes_moved(call(aten.zeros_like.default, x)) == 4800
    assert bytes_moved(call(aten.empty_like.default, x)) == 0
    assert bytes_moved(call(aten._to_copy.default, x, dtype=torch.bfloat16)) == 4800 + 2400


def test_an_argument_given_twice_is_read_once() -> None:
    with FakeTensorMode():
        x = torch.empty(30, 40)
        squared = OpCall(aten.mul.Tensor, (x, x), {}, x * x)
    assert bytes_moved(squared) == 2 * 4800


def test_expanded_tensors_are_read_once() -> None:
    with FakeTensorMode():
        x, row = torch.empty(30, 40), torch.empty(1, 40).expand(30, 40)
        added = OpCall(aten.add.Tensor, (x, row), {}, x + row)
    assert bytes_moved(added) == 2 * 4800 + 160


def test_views_cost_nothing() -> None:
    view = call(aten.view.default, empty(30, 40), [40, 30])
    assert view.is_view()
    assert bytes_moved(view) == 0
    for device in DEVICES.values():
        assert Roofline(device).cost(view) == Cost(0.0, 0)
    assert Measured("cpu").cost(view) == Cost(0.0, 0)


def test_look_ups_read_what_they_look_up() -> None:
    indices = empty(10, dtype=torch.int64)
    embedding = call(aten.embedding.default, empty(50_000, 16), indices)
    assert bytes_moved(embedding) == 2 * (4 * 10 * 16) + 80
    chances, target = empty(64, 50_000), empty(64, dtype=torch.int64)
    loss = call(aten.nll_loss_forward.default, chances, target, None, 1, -100)
    assert bytes_moved(loss) < 1000
    arguments = (empty(), chances, target, None, 1, -100, empty())
    gradient = call(aten.nll_loss_backward.default, *arguments)
    assert bytes_moved(gradient) == 4 * 64 * 50_000 + 64 * 8 + 8


def test_work_in_place_writes_what_it_changes() -> None:
    x, y = empty(30, 40), empty(30, 40)
    assert bytes_moved(call(aten.add_.Tensor, x, y)) == 3 * 4800
    with FakeTensorMode():
        one, other = [torch.empty(30, 40)], [torch.empty(30, 40)]
        torch._foreach_add_(one, other)
        foreach = OpCall(aten._foreach_add_.List, (one, other), {}, None)
    assert bytes_moved(foreach) == 3 * 4800


# ---- roofline ----------------------------------------------------------------------------------


def test_roofline_is_the_slowest_of_arithmetic_memory_and_dispatch() -> None:
    t4 = named("t4")
    roofline = Roofline(t4)
    large = call(aten.mm.default, empty(4096, 4096), empty(4096, 4096))
    assert roofline.cost(large).time_s == pytest.approx(2 * 4096**3 / t4.flops_per_s["float32"])
    wide = call(aten.relu.default, empty(4096, 4096))
    assert roofline.cost(wide).time_s == pytest.approx(2 * 4 * 4096**2 / t4.bytes_per_s)
    assert roofline.cost(call(aten.relu.default, empty(2, 2))).time_s == DISPATCH_S


def test_each_dtype_has_its_rate() -> None:
    h100 = named("h100")

    def time_s(dtype: torch.dtype) -> float:
        x = empty(8192, 8192, dtype=dtype)
        return Roofline(h100).cost(call(aten.mm.default, x, x)).time_s

    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float64, "float64")):
        assert time_s(dtype) == pytest.approx(2 * 8192**3 / h100.flops_per_s[name])


@pytest.fixture
def precision() -> Iterator[Callable[[str, str], None]]:
    """Sets torch's float32 precision of convolutions and of products, until the test is over."""
    holders = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [holder.fp32_precision for holder in holders]

    def set_to(*names: str) -> None:
        for holder, name in zip(holders, names, strict=True):
            holder.fp32_precision = name

    yield set_to
    set_to(*before)


def test_tf32_is_used_where_torch_would_use_it(precision: Callable[[str, str], None]) -> None:
    """TF32 is used by default in convolutions, and in matrix products if enabled."""
    a100 = named("a100")
    x = empty(8192, 8192)
    product = call(aten.mm.default, x, x)
    shapes = empty(64, 256, 56, 56), empty(256, 256, 3, 3)
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution = call(aten.convolution.default, *shapes, *options)

    def rates() -> list[float]:
        return [flops_of(of) / Roofline(a100).cost(of).time_s for of in (convolution, product)]

    assert rates() == pytest.approx([a100.rate("tfloat32"), a100.rate("float32")])
    precision("ieee", "tf32")
    assert rates() == pytest.approx([a100.rate("float32"), a100.rate("tfloat32")])


def test_roofline_finds_itself_again_by_its_description() -> None:
    for device in DEVICES.values():
        again = from_description(json.loads(json.dumps(Roofline(device).description)))
        assert isinstance(again, Roofline)
        assert again.hardware is device
    assert isinstance(from_description(Measured("cpu").description), Measured)
    assert isinstance(from_description({}), Roofline)
