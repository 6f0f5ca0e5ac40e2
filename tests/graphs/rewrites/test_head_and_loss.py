"""The head and its loss in row chunks: errors against float64, and what is left alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.costs import cpu_peak_bytes
from graphs.rewrites import HEAD_AND_LOSS, Variants, chunk_sizes, is_stock, results_of, variants_of
from graphs.trace import trace, trace_variants
from scheduler_runtime import apply
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.program import build_program
from scheduler_runtime.export import ExportError, to_torch_checkpoint
from solver import solve
from solver.reporting import step_notes
from solver.schedule import baseline, simulate
from tests.support.budgets import baseline_peak_bytes
from tests.support.wide_logits import IGNORED, Head, captured, rows

REWRITE = ("head_and_loss_in_4_chunks", "in_place")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(chunk_sizes, "LEAST_ROWS", 64)


class Model(nn.Module):
    """Tokens, a layer, a head (tied: the embedding), a loss of (logits, targets)."""

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        bias: bool = False,
        tied: bool = False,
        transposed: bool = False,
        n_classes: int = 509,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(n_classes, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, n_classes, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.matrix = nn.Parameter(torch.randn(32, n_classes) / 6) if transposed else None
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = torch.tanh(self.layer(self.tokens(x)))
        logits = self.head(hidden) if self.matrix is None else hidden @ self.matrix
        return self.loss(logits, y)


def batch(n_classes: int = 509) -> tuple[torch.Tensor, torch.Tensor]:
    """512 rows of common and rare classes; some are ignored."""
    torch.manual_seed(0)
    y = (n_classes * torch.rand(2, 256) ** 3).long()
    y[0, :9], y[1, 30:36] = IGNORED, IGNORED
    return torch.randint(0, n_classes, (2, 256)), y


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32 at least, as libraries do."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*rows(wide(logits), y))


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": mean,
    "sum, divided afterwards": lambda x, y: (
        F.cross_entropy(*rows(wide(x), y), reduction="sum") / 493
    ),
    "in the dtype of the head": lambda x, y: F.cross_entropy(*rows(x, y)),
    "temperature": lambda x, y: F.cross_entropy(*rows(wide(x) / 3.0, y)) * 9.0,
    "class 0 is ignored": lambda x, y: F.cross_entropy(*rows(wide(x), y.clamp(0)), ignore_index=0),
}

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "tied": {"tied": True},
    "transposed": {"transposed": True},
}


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm."""
    return {
        name: float((found[name].double() - exact[name]).norm() / exact[name].norm())
        for name in exact
    }


def step_results(
    model: nn.Module, run: Callable[[], torch.Tensor], *, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = run()
    (loss * scale).backward()
    found = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def three_ways(
    model: nn.Module, x: Any, y: Any, *, autocast: bool = False, scale: float = 1.0
) -> tuple[dict[str, torch.Tensor], ...]:
    """Loss and gradients of the rewritten step, of the plain one, and of that in float64."""

    def on() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)

    with on():
        step, call = captured(model, x, y, REWRITE)
    assert any(node.op.startswith("head_loop") for node in step.graph.nodes)
    program = BoundProgram(step, build_program(step, baseline(step.graph)))
    found = step_results(model, lambda: program.run(model, call), scale=scale)

    def plain() -> torch.Tensor:
        with on():
            return model(x, y)

    exact = copy.deepcopy(model).double()
    return (
        found,
        step_results(model, plain, scale=scale),
        step_results(exact, lambda: exact(x, y)),
    )


def assert_as_exact(found: Any, plain: Any, exact: Any, dtype: torch.dtype) -> None:
    """Errors are at most twice the plain step's, or a rounding of the result."""
    assert found.keys() == plain.keys() == exact.keys()
    ours, theirs = errors(found, exact), errors(plain, exact)
    rounding = torch.finfo(dtype).eps / 2
    for name, error in ours.items():
        assert error <= max(2 * theirs[name], rounding), (name, error, theirs[name])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("form", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow(sample=1, keep=20)
def test_errors_are_at_most_twice_those_of_the_plain_step(loss, form, kind) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = Model(LOSSES[loss], **MODELS[form]).to(dtype)
    ways = three_ways(model, *batch(), autocast=kind == "autocast")
    assert_as_exact(*ways, dtype)


@pytest.mark.slow
def test_many_chunks_in_bfloat16_do_not_add_up_roundings() -> None:
    """All rows have one class, so that the sums over chunks grow steadily."""
    torch.manual_seed(1)
    model = Head(mean, 64).to(torch.bfloat16)
    x = torch.rand(32, 128, 8).to(torch.bfloat16)
    y = torch.zeros(32, 128, dtype=torch.long)
    step, call = captured(model, x, y, ("head_and_loss_in_64_chunks",))
    program = BoundProgram(step, build_program(step, baseline(step.graph)))
    exact = copy.deepcopy(model).double()
    ways = (
        step_results(model, lambda: program.run(model, call)),
        step_results(model, lambda: model(x, y)),
        step_results(exact, lambda: exact(x.double(), y)),
    )
    assert_as_exact(*ways, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**16, 1e-3])
def test_the_gradient_of_the_loss_is_multiplied_in_the_backward_pass(scale) -> None:
    """As GradScaler and accumulation do; a scale that is infinite shows in the gradients."""
    torch.manual_seed(1)
    model = Model(mean, tied=True)
    assert_as_exact(*three_ways(model, *batch(), scale=scale), torch.float32)
    step, call = captured(model, *batch(), REWRITE)
    program = BoundProgram(step, build_program(step, baseline(step.graph)))
    model.zero_grad()
    (program.run(model, call) * float("inf")).backward()
    assert not any(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["trunk", "head", "weight"])
def test_gradients_that_nobody_wants_are_not_made(frozen) -> None:
    torch.manual_seed(1)
    model = Model(mean, bias=True)
    parts = {"trunk": [model.tokens, model.layer], "head": [model.head], "weight": []}
    for part in parts[frozen]:
        part.requires_grad_(False)
    if frozen == "weight":
        model.head.weight.requires_grad_(False)
    assert_as_exact(*three_ways(model, *batch()), torch.float32)
    (loop,) = (n for n in trace(model, batch(), rewrites=REWRITE).nodes if "head_loop" in n.op)
    made = loop.op.split(" -> ")[1].split(";")[0]
    expected = {"trunk": "weight.t, bias", "head": "rows", "weight": "rows, bias"}
    assert sorted(made.split(", ")) == sorted(expected[frozen].split(", "))


def test_a_batch_without_a_row_that_counts_is_as_in_the_plain_step() -> None:
    """The mean of nothing is NaN, and its gradients are 0."""
    torch.manual_seed(1)
    x, y = batch()
    model = Model(mean)
    found, plain, _ = three_ways(model, x, torch.full_like(y, IGNORED))
    assert found["loss"].isnan()
    assert plain["loss"].isnan()
    assert all(torch.equal(found[n], plain[n]) for n in plain if n != "loss")


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: (mean(x, y), x),
        lambda x, y: mean(x, y) + 1e-4 * x.square().mean(),
        lambda x, y: F.cross_entropy(*rows(x, y), label_smoothing=0.1),
        lambda x, y: F.cross_entropy(*rows(x, y), weight=torch.ones(509)),
        lambda x, y: F.cross_entropy(*rows(x, y), reduction="none").square().mean(),
        lambda x, y: F.cross_entropy(*rows(x.relu(), y)),
        lambda x, y: mean(x[:1], y[:1]) + mean(x[1:], y[1:]),
    ],
    ids=["returned", "read twice", "smoothed", "weights", "by row", "another operator", "halves"],
)
def test_other_heads_are_left_alone(loss) -> None:
    model = Model(loss)
    plain, rewritten = trace(model, batch()), trace(model, batch(), rewrites=REWRITE[:1])
    assert rewritten.graph_id == plain.graph_id


def test_float16_is_left_alone() -> None:
    """Its loss scale is made for gradients of the backward pass."""
    model = Model(mean)
    with torch.autocast("cpu", dtype=torch.float16):
        graph = trace(model, batch(), rewrites=REWRITE[:1])
    assert not any("head_loop" in node.op for node in graph.nodes)


@pytest.mark.slow
def test_two_heads_of_one_step() -> None:
    torch.manual_seed(1)

    class Two(Model):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            hidden = torch.tanh(self.layer(self.tokens(x)))
            other = F.cross_entropy(*rows(hidden @ self.matrix, y))
            return mean(self.head(hidden), y) + 0.3 * other

    model = Two(mean, transposed=True)
    assert_as_exact(*three_ways(model, *batch()), torch.float32)
    graph = trace(model, batch(), rewrites=REWRITE)
    assert sum("head_loop" in node.op for node in graph.nodes) == 2


@pytest.mark.slow
def test_memory_and_time_are_those_of_chunks() -> None:
    """No logits: a chunk of them and its gradient; predicted as measured."""
    x, y = batch(4099)
    model = Model(mean, n_classes=4099)
    for n_chunks in (2, 8):
        step, call = captured(model, x, y, (f"head_and_loss_in_{n_chunks}_chunks", "in_place"))
        simulation = simulate(step.graph, baseline(step.graph))
        extra_bytes = simulation.peak_bytes - step.graph.resident_bytes
        chunk = 4 * 512 * 4099 // n_chunks
        weight = 4 * 32 * 4099
        assert 2 * chunk < extra_bytes < 2.05 * chunk + 4 * weight
        program = BoundProgram(step, build_program(step, baseline(step.graph)))
        run = lambda: step_results(model, lambda: program.run(model, call))  # noqa: B023, E731
        run()
        model.zero_grad()  # what is freed while it is measured would be subtracted
        gc.collect()
        taken_bytes = cpu_peak_bytes(run).peak_bytes
        assert taken_bytes == pytest.approx(extra_bytes, abs=1e5)
    plain = trace(model, (x, y))
    assert 1.0 < step.graph.baseline_time_s / plain.baseline_time_s < 1.1


@pytest.mark.slow
def test_the_word_plans_them_beside_the_others_and_the_best_runs(tmp_path) -> None:
    """Within a budget that no bitwise variant meets; the schedule file says how many chunks."""
    torch.manual_seed(1)
    x, y = batch(4099)
    model = Model(mean, n_classes=4099)
    names = {name for variant in variants_of("allclose") for name in variant}
    assert names.issuperset(HEAD_AND_LOSS)
    assert not any(name in HEAD_AND_LOSS for v in variants_of("bitwise") for name in v)
    step = trace_variants(model, (x, y), rewrites="allclose")
    assert {g.meta.rewrites[0] for g in step.planned[4:]} == {
        f"head_and_loss_in_{n}_chunks" for n in (2, 4, 8)
    }
    bitwise = solve(model, (x, y), budget=1)
    least = bitwise.obstacle.proven_bytes
    solution = solve(model, (x, y), budget=least - 1, rewrites="allclose")
    assert results_of(solution.graph.meta.rewrites) == "allclose"
    assert solution.lower_bound_s <= solution.simulation.time_s
    plain = simulate(solution.plain, baseline(solution.plain))
    assert solution.baseline.time_s == plain.time_s
    exact = copy.deepcopy(model).double()
    ways = [step_results(model, lambda: model(x, y)), step_results(exact, lambda: exact(x, y))]
    twin = copy.deepcopy(model)
    apply(model, solution)
    found = step_results(model, lambda: model(x, y))
    assert_as_exact(found, *ways, torch.float32)
    solution.save(tmp_path / "schedule.json")
    assert f'"{solution.graph.meta.rewrites[0]}"' in (tmp_path / "schedule.json").read_text()
    apply(twin, tmp_path / "schedule.json")
    again = step_results(twin, lambda: twin(x, y))
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.slow
def test_what_runs_pytorchs_own_step_is_planned_without_them() -> None:
    """For FSDP2 and for export: within the budget, or refused."""
    torch.manual_seed(1)
    x, y = batch(4099)
    model = Model(mean, n_classes=4099)
    sharded = solve(model, (x, y), budget="1GB", fsdp=2, rewrites="allclose")
    assert is_stock(sharded.graph.meta.rewrites)
    assert any("The step is PyTorch's own" in note for note in step_notes(sharded.graph))
    graph = trace(model, (x, y), rewrites=REWRITE)
    peak_bytes = baseline_peak_bytes(graph)
    plain = trace(model, (x, y))
    for budget, fits in ((peak_bytes, False), (baseline_peak_bytes(plain), True)):
        rewritten = solve(graph, budget=budget)
        solution = dataclasses.replace(rewritten, variants=Variants(plain, (plain, graph)))
        assert "head_and_loss_in_4_chunks" in solution.graph.meta.rewrites
        if fits:
            assert to_torch_checkpoint(model, solution).peak_bytes <= budget
        else:
            with pytest.raises(ExportError, match="without these nothing fits"):
                to_torch_checkpoint(model, solution)
