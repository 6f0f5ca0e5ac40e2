"""Measured costs: seconds and workspace of operators that are run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import (
    FlopCounterMode,
)

from graphs.costs.memory_events import cpu_peak_bytes
from graphs.costs.models import (
    Measured,
    OpCall,
    Roofline,
)
from graphs.costs.real_calls import runner
from graphs.hardware import named
from tests.graphs.costs.test_costs import call, empty

aten = torch.ops.aten


def traced_calls(model: nn.Module, *args: torch.Tensor) -> list[OpCall]:
    """Every operator of a forward and backward pass."""

    def step(*inputs: torch.Tensor) -> Any:
        return torch.autograd.grad(model(*inputs), list(model.parameters()))

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [OpCall.from_node(node) for node in nodes if "val" in node.meta]


class Everything(nn.Module):
    """Embedding, convolution, batch norm, attention, dropout, pooling, look-ups and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 100)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2)))
        x = F.max_pool2d(F.dropout(x, 0.1).unsqueeze(1), 1).squeeze(1).transpose(1, 2)
        heads = x.unflatten(2, (2, 8)).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        x = x[torch.arange(tokens.shape[0])].gather(1, tokens.unsqueeze(-1).expand(-1, -1, 16) % 8)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def calls() -> list[OpCall]:
    tokens = torch.zeros(4, 12, dtype=torch.int64)
    return traced_calls(Everything(), tokens, tokens)


@pytest.mark.parametrize(
    ("one", "other"),
    [((16, 8), (2, 8, 16)), ((2, 8, 16), (16, 16)), ((8, 16), (16, 16))],
    ids=["rows", "columns", "inner dimension"],
)
def test_grouped_products_are_measured_with_groups_that_hold_something(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    ends = empty(2, dtype=torch.int32)
    half = torch.bfloat16
    product = call(
        aten._grouped_mm.default, empty(*one, dtype=half), empty(*other, dtype=half), ends
    )
    assert (runner(product, torch.device("cpu"))() > 0).all()


def test_every_operator_of_a_step_can_be_measured(calls: list[OpCall]) -> None:
    measured = Measured("cpu", n_runs=1)
    for one in calls:
        cost = measured.cost(one)
        assert (cost.time_s == 0) == one.is_view()
    assert measured.n_fallbacks == 0
    assert 20 < measured.description["n_distinct"] <= len({one.key() for one in calls})
    json.dumps(measured.description)


def test_a_call_is_measured_once(calls: list[OpCall]) -> None:
    measured = Measured("cpu", n_runs=1)
    first = [measured.cost(one) for one in calls]
    n_distinct = measured.description["n_distinct"]
    with mock.patch.object(Measured, "_measure", side_effect=AssertionError("measured again")):
        assert [measured.cost(one) for one in calls] == first
    assert measured.description["n_distinct"] == n_distinct


def test_measured_workspace_is_what_the_profiler_sees() -> None:
    """A product of a transposed sum takes a copy; one of plain matrices takes nothing."""
    x = torch.randn(64, 64)
    plain = OpCall(aten.mm.default, (x, x), {}, x @ x)
    assert Measured("cpu").cost(plain).workspace_bytes == 0
    chances = torch.rand(1000, 100)
    target = aten.sort.default
    sort = OpCall(target, (chances, 0), {}, target(chances, 0))
    made_bytes = 1000 * 100 * (4 + 8)
    expected = cpu_peak_bytes(lambda: target(chances, 0)).peak_bytes - made_bytes
    assert Measured("cpu").cost(sort).workspace_bytes == expected


def test_the_time_is_the_median_of_the_runs() -> None:
    """By a clock of the test's own, on which runs take 1, 9, 2, 1, 9, 2 … us."""
    product = call(aten.mm.default, empty(16, 16), empty(16, 16))
    ticks = itertools.accumulate(itertools.cycle((1e-6, 1e-6, 1e-6, 9e-6, 1e-6, 2e-6)))
    with mock.patch("graphs.costs.host_copies.time.perf_counter", side_effect=ticks):
        cost = Measured("cpu", n_runs=3).cost(product)
    assert cost.time_s == pytest.approx(2e-6)


def test_modes_and_random_numbers_stay_out_of_it() -> None:
    """Under autocast a product would be another one, and under a FLOP counter tensors stay."""
    dropout = call(aten.native_dropout.default, empty(64, 64), 0.5, True)
    product = call(aten.mm.default, empty(64, 64), empty(64, 64))
    state = torch.get_rng_state()
    expected = Measured("cpu").cost(product).workspace_bytes
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        FlopCounterMode(display=False) as counter,
        FakeTensorMode(),
    ):
        measured = Measured("cpu")
        assert measured.cost(product).workspace_bytes == expected == 0
        measured.cost(dropout)
    assert measured.n_fallbacks == 0
    assert counter.get_total_flops() == 0
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_run_falls_back_to_the_roofline() -> None:
    h100 = named("h100")
    x = empty(8, 8)
    unknown = OpCall(aten.add.Tensor, (x, empty(9, 9)), {}, empty(8, 8))
    huge = OpCall(aten.relu.default, (empty(2**44),), {}, empty(2**44))
    measured = Measured("cpu", fallback=h100)
    for one in (unknown, huge):
        assert measured.cost(one) == Roofline(h100).cost(one)
    assert measured.n_fallbacks == measured.description["n_fallbacks"] == 2


def test_only_devices_that_can_be_measured() -> None:
    with pytest.raises(ValueError, match="mps"):
        Measured("mps")
    with pytest.raises(ValueError, match="n_runs"):
        Measured("cpu", n_runs=0)


def test_calls_that_cost_the_same_have_one_key() -> None:
    x = empty(4, 4)
    one = call(aten.mm.default, x, x)
    assert one.key() == call(aten.mm.default, empty(4, 4), empty(4, 4)).key()
    others = [
        call(aten.mm.default, empty(4, 4), empty(4, 5)),
        call(aten.mm.default, empty(4, 4, dtype=torch.float64), empty(4, 4, dtype=torch.float64)),
        dataclasses.replace(one, args=(x, x.t())),
    ]
    assert len({one.key(), *(other.key() for other in others)}) == 4
    sums = [call(aten.sum.dim_IntList, empty(4, 4), [dim]) for dim in (0, 1)]
    assert sums[0].key() != sums[1].key()
    nested = [
        OpCall(aten.cat.default, ([x, x],), {}, x),
        OpCall(aten.cat.default, ([x], [x]), {}, x),
    ]
    assert nested[0].key() != nested[1].key()
