"""Outputs into dying inputs: the operators, their bits and memory, what is never overwritten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.same_bits import solution_of
from graphs.costs import cpu_peak_bytes
from graphs.graph import Graph
from graphs.rewrites import Variants
from graphs.rewrites.in_place import _writing_overload
from graphs.trace import trace
from scheduler_runtime import apply
from solver.schedule import Compute, baseline, simulate
from tests.support.bitwise import assert_same_gradients
from tests.support.models import NormAndDropout, SharedGradients, TiedLanguageModel

aten = torch.ops.aten
IN_PLACE = ("in_place",)
MASK = torch.rand(64, 4096) < 0.5
WRITES_OVER_THE_FIRST = [
    (aten.add.Tensor, ("y",)),
    (aten.sub.Tensor, ("y",)),
    (aten.mul.Tensor, ("y",)),
    (aten.div.Tensor, ("y",)),
    (aten.mul.Tensor, ("row",)),
    (aten.mul.Tensor, (0.3,)),
    (aten.div.Tensor, (0.3,)),
    (aten.add.Tensor, (0.3,)),
    (aten.neg.default, ()),
    (aten.relu.default, ()),
    (aten.exp.default, ()),
    (aten.tanh.default, ()),
    (aten.sigmoid.default, ()),
    (aten.rsqrt.default, ()),
    (aten.pow.Tensor_Scalar, (3,)),
    (aten.maximum.default, ("y",)),
    (aten.addcmul.default, ("y", "y")),
    (aten.masked_fill.Scalar, (MASK, 0.0)),
    (aten.threshold_backward.default, ("y", 0)),
    (aten.gelu_backward.default, ("y",)),
    (aten.silu_backward.default, ("y",)),
    (aten.sigmoid_backward.default, ("y",)),
    (aten.tanh_backward.default, ("y",)),
    (aten.leaky_relu_backward.default, ("y", 0.1, False)),
    (aten.hardtanh_backward.default, ("y", -1.0, 1.0)),
    (aten.hardsigmoid_backward.default, ("y",)),
    (aten.softplus_backward.default, ("y", 1.0, 20.0)),
    (aten.elu_backward.default, (1.0, 1.0, 1.0, False, "y")),
    (aten._softmax.default, (-1, False)),
    (aten._log_softmax.default, (-1, False)),
    (aten._softmax_backward_data.default, ("y", -1, "dtype")),
    (aten._log_softmax_backward_data.default, ("y", -1, "dtype")),
]
LEFT_OUT = [
    aten.mm.default,
    aten.sum.dim_IntList,
    aten.native_layer_norm_backward.default,
    aten.native_dropout_backward.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.hardswish_backward.default,
    aten.rrelu.default,
    aten.mul.Scalar,  # in 16 bits mul_ rounds the number first
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writing_over_an_input_keeps_every_bit_and_allocates_nothing(dtype: torch.dtype) -> None:
    given = {"y": torch.randn(64, 4096).to(dtype), "row": torch.randn(4096).to(dtype)}
    calls: list[Callable[[], torch.Tensor]] = []
    inputs, expected = [], []
    for operator, names in WRITES_OVER_THE_FIRST:
        x = torch.randn(64, 4096).to(dtype)
        named = {**given, "dtype": dtype}
        rest = [named[item] if isinstance(item, str) else item for item in names]
        expected.append(operator(x.clone(), *rest))
        overload, keyword = _writing_overload(operator)
        assert overload is not None, operator
        calls.append(partial(overload, x, *rest, **({keyword: x} if keyword else {})))
        inputs.append(x)
    made: list[torch.Tensor] = []
    used = cpu_peak_bytes(lambda: made.extend(call() for call in calls))
    for (operator, _), x, new, right in zip(
        WRITES_OVER_THE_FIRST, inputs, made, expected, strict=True
    ):
        assert new is x, operator
        assert torch.equal(x.view(torch.int16), right.view(torch.int16)), operator
    # threads may keep a row each in 32 bits (softmax in 16 bits)
    assert used.peak_bytes < inputs[0].nbytes / 4


@pytest.mark.parametrize("operator", LEFT_OUT, ids=str)
def test_operators_that_compute_first_and_copy_then_are_left_out(operator: Any) -> None:
    assert _writing_overload(operator) == (None, None)


def overwrites(graph: Graph) -> dict[str, str]:
    """Name of a node that overwrites an input -> that input."""
    return {node.name: node.overwrites for node in graph.nodes if node.overwrites}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("model", [NormAndDropout, SharedGradients, TiedLanguageModel])
def test_gradients_outputs_and_what_the_forward_pass_saves_stay(model: Any) -> None:
    net = model()
    graph = trace(net, net.batch(), rewrites=IN_PLACE)
    done = overwrites(graph)
    assert done
    plain = trace(net, net.batch())
    assert [n.name for n in graph.nodes] == [n.name for n in plain.nodes]
    assert graph.outputs == plain.outputs
    for name, old in done.items():
        node = graph.node_by_name[name]
        both = {old, *node.outputs}
        assert not both & set(graph.outputs)
        assert {graph.tensor_by_name[each].kind for each in both} == {"activation"}
        assert graph.producer[old].phase == node.phase == "backward"


class Shapes(nn.Module):
    """Gradients that may not be overwritten: read again, of another form, seen twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.w)
        twice = torch.tanh(h) * torch.sigmoid(h)  # the gradient of the product is read twice
        squared = (twice @ twice.t()).exp() * 1e-3
        return (squared + squared.t().exp() * 1e-3).sum() + h.double().tanh().sum().float()


def test_every_overwrite_is_of_a_last_read_of_the_same_form() -> None:
    torch.manual_seed(0)
    model, x = Shapes(), torch.randn(16, 16) / 16
    graph = trace(model, x, rewrites=IN_PLACE)
    last = {name: node.name for node in graph.nodes for name in node.inputs}
    done = overwrites(graph)
    assert done
    for name, old in done.items():
        assert last[old] == name
        made = graph.node_by_name[name].outputs[0]
        assert graph.tensor_by_name[old].size_bytes == graph.tensor_by_name[made].size_bytes


def test_complex_gradients_are_not_overwritten() -> None:
    """On the CPU, division over its input has other last bits than beside it."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(63, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            c, d = torch.view_as_complex(self.w * x), torch.view_as_complex(self.w + x)
            return torch.view_as_real((c * c / d) * c / (d * d)).square().mean()

    graph = trace(Complex(), torch.randn(63, 2), rewrites=IN_PLACE)
    assert any(node.op == "aten.div.Tensor" for node in graph.later_nodes)
    assert "aten.div.Tensor" not in {graph.node_by_name[name].op for name in overwrites(graph)}


class _GivesATable(torch.autograd.Function):
    """Its gradient is a tensor that it was given, not a new one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.table = table
        return x * table

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.table, None


class _Piece(nn.Module):
    """Branches on a number, so that it runs as one piece, with its own Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean().item() > 1e9:
            x = 2 * x
        return _GivesATable.apply(x, self.table)


@pytest.mark.slow
def test_what_a_part_that_is_not_traced_may_hold_is_not_overwritten() -> None:
    """Its gradient may be an attribute of a module, or what a hook has been given to keep."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Sigmoid(), _Piece(), nn.Linear(32, 1))
    x, table = torch.randn(64, 16), model[3].table.clone()
    plain = copy.deepcopy(model)
    graph = trace(model, x, loss=lambda made, _: made.square().mean(), rewrites=IN_PLACE)
    apply(model, solution_of(graph, baseline(graph)))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        assert_same_gradients(plain, model)
    assert torch.equal(model[3].table, table)


def test_a_chain_of_elementwise_gradients_takes_one_tensor() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return F.gelu(torch.tanh(F.silu(y))).sin().sum()

    plain, graph = (trace(Chain(), torch.randn(1024, 64), rewrites=r) for r in ((), IN_PLACE))
    names = overwrites(graph)
    assert len(names) == 4
    assert len({graph.root(name) for name in names.values()}) == 1
    before, after = bytes_while_running(plain), bytes_while_running(graph)
    assert {before[name] - after[name] for name in names} == {1024 * 64 * 4}


def bytes_while_running(graph: Graph) -> dict[str, int]:
    """Node -> bytes on the device while it runs in the framework's order."""
    schedule = baseline(graph)
    live_bytes = simulate(graph, schedule).live_bytes
    ops = zip(schedule.ops, live_bytes, strict=True)
    return {op.node: size for op, size in ops if isinstance(op, Compute)}


@pytest.mark.slow
def test_the_plain_step_of_a_graph_read_from_a_file() -> None:
    model, batch = TiedLanguageModel(), TiedLanguageModel.batch()
    graph = trace(model, batch, rewrites=IN_PLACE)
    again = Variants.of(Graph.from_json(graph.to_json()))
    assert again.plain == trace(model, batch)
    assert again.plain.meta.rewrites == []
    assert again.planned == (graph,)
