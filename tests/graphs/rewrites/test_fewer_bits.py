"""Storages that wait in fewer bits: which bits come back, which program runs, what it takes."""

from __future__ import annotations

import contextlib
import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from graphs.costs import Measured
from graphs.graph import Graph
from graphs.rewrites import FEWER_BITS, fewer_bits
from graphs.rewrites.codes import Code, Pack, Unpack
from graphs.trace import trace, trace_variants
from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from scheduler_runtime.verifying import run_both_steps
from solver.reporting.report_data import rewritten
from solver.schedule import Link, Place, Places, Schedule, Store, baseline, keep, simulate
from tests.support import bitwise
from tests.support.bitwise import assert_equal
from tests.support.budgets import baseline_peak_bytes
from tests.support.plain_simulator import assert_simulators_agree
from tests.support.schedules_with_copies import copy_away, unused_gaps

WIDTH, N_ROWS = 64, 512
PLACES = Places(host=Place(10**9, Link(1e9, 1e9)))
solution_of = partial(bitwise.solution_of, places=PLACES)
EVERYTHING = ("packed_masks", "waiting_in_int8", "in_place")


class Masked(nn.Module):
    """Masks of truth values, one of them of a view; matrices, one read by way of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = nn.functional.gelu(layer(x))
            x = x + torch.where(torch.rand_like(y) > 0.2, y, 0.0)
            tall = x.view(-1, 2, WIDTH).transpose(0, 1)
            x = tall.masked_fill(tall > 2, 0.0).transpose(0, 1).reshape(-1, WIDTH)
        return x.square().mean()


class Saturated(nn.Module):
    """Operators that save their own results, which their gradients read as detached."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, function in zip(
            self.layers, (torch.tanh, torch.sigmoid, torch.relu, torch.exp), strict=True
        ):
            x = x + function(layer(x))
        return x.square().mean()


class TransposedMask(torch.autograd.Function):
    """Reads what it has saved by way of a view that the backward pass makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        ctx.save_for_backward(mask)
        return torch.where(mask, x, x * 0.1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return torch.where(mask.t(), gradient.t(), gradient.t() * 0.1).t()


class WithTransposedMask(Saturated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = TransposedMask.apply(layer(x))
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(N_ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Masked()


def results(model: nn.Module, hooks: Any = None) -> list[torch.Tensor]:
    """Loss and gradients of a step."""
    torch.manual_seed(1)
    model.zero_grad()
    with hooks or contextlib.nullcontext():
        loss = model(batch())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def with_plan(model: nn.Module, graph: Graph, schedule: Schedule) -> list[torch.Tensor]:
    planned = copy.deepcopy(model)
    apply(planned, solution_of(graph, schedule))
    return results(planned)


def all_away(graph: Graph, schedule: Schedule) -> Schedule:
    chosen = [gap for gap in unused_gaps(graph, schedule) if gap.stop - gap.start > 6]
    return copy_away(graph, schedule, chosen)


def there_and_back(code: Code, numbers: torch.Tensor) -> torch.Tensor:
    rows = numbers.reshape(-1, code.width)
    stored = Pack.of(code, len(rows))(rows)
    parts = stored if isinstance(stored, tuple) else (stored,)
    assert [(tuple(part.shape), part.dtype) for part in parts] == [*code.packed(len(rows))]
    found: torch.Tensor = Unpack.of(code, len(rows))(*parts)
    return found.view(numbers.shape)


def rounding(name: str) -> torch.autograd.graph.saved_tensors_hooks:
    """What eager mode saves is stored by the code, all but what is not made by the forward pass."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        code = Code.of(name, dtype=tensor.dtype, n_elements=tensor.numel())
        is_small = tensor.numel() < fewer_bits.LEAST_ELEMENTS
        if code is None or is_small or isinstance(tensor, nn.Parameter) or tensor.is_leaf:
            return tensor
        return there_and_back(code, tensor.contiguous())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)


@pytest.mark.parametrize("seed", range(5))
def test_masks_come_back_with_every_bit(seed: int) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(8 * (1 + 7777 * seed)) < seed / 4
    code = Code.of("bits", dtype=mask.dtype, n_elements=mask.numel())
    assert torch.equal(there_and_back(code, mask), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("name", "most"), [("bf16", 2**-8), ("fp8", 2**-4), ("int8", 1 / 253)])
def test_what_rounding_does(name: str, most: float, dtype: torch.dtype) -> None:
    """Of bf16 and fp8 relative to the number, where it is not tiny in its row; of int8 to the
    largest of the row."""
    torch.manual_seed(0)
    numbers = (torch.randn(600, 64) * 10.0 ** torch.randint(-2, 3, (600, 1))).to(dtype)
    numbers[3] = 0
    code = Code.of(name, dtype=dtype, n_elements=numbers.numel())
    if code is None:
        assert (name, dtype.itemsize) == ("bf16", 2)
        return
    before = numbers.clone()
    rows, found = numbers.view(-1, code.width), there_and_back(code, numbers).view(-1, code.width)
    assert torch.equal(numbers, before)
    row = rows.abs().amax(1, keepdim=True).double()
    off = (found.double() - rows.double()).abs()
    rounded_again = torch.finfo(dtype).eps * row
    reference = row if name == "int8" else torch.maximum(rows.double().abs(), row * 2**-6)
    assert (off <= most * reference * 1.001 + rounded_again).all()
    assert name == "int8" or (off > 0).any()


def test_no_code_for_what_would_not_be_smaller() -> None:
    def has(name: str, dtype: torch.dtype, n_elements: int) -> bool:
        return Code.of(name, dtype=dtype, n_elements=n_elements) is not None

    assert has("int8", torch.bfloat16, 64)
    assert not has("bf16", torch.float16, 64)
    assert not has("int8", torch.float32, 65)  # no whole rows
    assert not has("int8", torch.int64, 64)
    assert not has("fp8", torch.complex64, 64)
    assert not has("bits", torch.bool, 12)
    assert not has("bits", torch.uint8, 16)


@pytest.mark.slow
def test_packed_masks_keep_every_bit(model: nn.Module) -> None:
    plain, graph = (trace(model, batch(), rewrites=names) for names in ((), ("packed_masks",)))
    packs = [node for node in graph.nodes if node.op == "pack(bits)"]
    assert len(packs) == 6
    assert {graph.tensor_by_name[node.outputs[0]].size_bytes for node in packs} == {
        N_ROWS * WIDTH // 8
    }
    peaks = [baseline_peak_bytes(each) for each in (plain, graph)]
    assert peaks[1] < peaks[0]
    expected = results(model)
    for schedule in (baseline(graph), keep(graph, set()), all_away(graph, baseline(graph))):
        assert_equal(with_plan(model, graph, schedule), expected)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["bf16", "fp8", "int8"])
def test_gradients_are_those_of_hooks_that_round_what_is_saved(code: str, model: nn.Module) -> None:
    """An independent program: eager mode with hooks of saved tensors."""
    graph = trace(model, batch(), rewrites=(f"waiting_in_{code}",))
    expected, plain = results(model, rounding(code)), results(model)
    assert not all(map(torch.equal, expected, plain))
    for schedule in (baseline(graph), keep(graph, set()), all_away(graph, baseline(graph))):
        found = with_plan(model, graph, schedule)
        assert_equal(found, expected)
        assert torch.equal(found[0], plain[0])  # the loss is not rounded


@pytest.mark.slow
@pytest.mark.parametrize("code", ["bf16", "int8"])
def test_results_that_operators_save_are_rounded_as_by_hooks(code: str) -> None:
    torch.manual_seed(0)
    test_gradients_are_those_of_hooks_that_round_what_is_saved(code, Saturated())


@pytest.mark.slow
def test_masks_may_be_read_by_views_of_the_backward_pass() -> None:
    torch.manual_seed(0)
    model = WithTransposedMask()
    graph = trace(model, batch(), rewrites=("packed_masks",))
    assert any(node.op == "pack(bits)" for node in graph.nodes)
    for schedule in (baseline(graph), keep(graph, set())):
        assert_equal(with_plan(model, graph, schedule), results(model))


@pytest.mark.slow
def test_on_the_way_out_fewer_bytes_are_copied(model: nn.Module) -> None:
    host_bytes = []
    for names in ((), EVERYTHING):
        graph = trace(model, batch(), rewrites=names)
        schedule = all_away(graph, baseline(graph))
        stored = {op.storage for op in schedule.ops if isinstance(op, Store)}
        makers = {graph.producer[name].op.partition("(")[0] for name in stored}
        assert ("pack" in makers) == bool(names)
        host_bytes.append(simulate(graph, schedule, places=PLACES).host_peak_bytes)
    assert host_bytes[1] < host_bytes[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_both_simulators_agree(seed: int, model: nn.Module) -> None:
    rng = random.Random(seed)
    graph = trace(model, batch(), rewrites=EVERYTHING)
    roots = sorted({graph.root(name) for name in graph.producer})
    schedule = keep(graph, rng.sample(roots, rng.randint(0, len(roots))))
    assert assert_simulators_agree(graph, schedule, PLACES)
    chosen = [
        gap for gap in unused_gaps(graph, schedule) if rng.random() < 0.5 and not gap.overwritten
    ]
    assert_simulators_agree(graph, copy_away(graph, schedule, chosen), PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["bits", "int8"])
def test_the_predicted_peak_is_measured(code: str, model: nn.Module) -> None:
    names = tuple(name for name, each in FEWER_BITS.items() if each == code)
    graph = trace(model, batch(), rewrites=names, costs=Measured(torch.device("cpu")))
    apply(model, solution_of(graph, keep(graph, set())))
    predicted_bytes = simulate(graph, keep(graph, set())).peak_bytes
    assert measure(model, batch(), n_steps=1).peak_bytes == pytest.approx(
        predicted_bytes, abs=100_000
    )


def test_what_is_returned_and_what_is_a_statistic_stays() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.norm(self.layer(x))
            return y.square().mean(), y

    graph = trace(Normed(), torch.randn(2**15, 4), rewrites=("waiting_in_bf16",))
    packed = [node.inputs[0] for node in graph.nodes if node.op == "pack(bf16)"]
    assert [graph.producer[name].op for name in packed] == ["aten.addmm.default"]


@pytest.mark.slow
def test_errors_are_measured_and_the_class_is_named(model: nn.Module) -> None:
    variants = trace_variants(model, batch(), rewrites="int8")
    graph = variants.planned[-1]
    assert tuple(graph.meta.rewrites) == EVERYTHING
    solution = solution_of(graph, baseline(graph))
    found = run_both_steps(
        solution,
        model=Masked,
        batch=batch,
        loss=None,
        inputs=None,
        optimizer=lambda model: torch.optim.SGD(model.parameters()),
        device="cpu",
        autocast=None,
    )
    assert (found.results, found.passed) == ("lossy", True)
    assert found.largest_error.startswith("median 2")
    assert "e-03, largest " in found.largest_error
    changed = rewritten(solution)
    assert changed.results == "lossy"
