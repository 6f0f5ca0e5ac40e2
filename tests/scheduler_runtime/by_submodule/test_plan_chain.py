"""Models that cannot be traced: planned by submodules, and run by stock checkpointing."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.costs.memory_events import begin_part, cpu_peak_bytes_by_part
from graphs.trace import TraceError
from scheduler_runtime import apply, remove
from scheduler_runtime.by_submodule.coarse_graph import SCOPE
from scheduler_runtime.by_submodule.eager_step import ObservedStep
from scheduler_runtime.by_submodule.observe import find_sequences, observe
from scheduler_runtime.by_submodule.planning import FallbackError, plan_chain
from scheduler_runtime.measuring import measure
from solver.schedule.simulator import simulate
from solver.solving import solve
from tests.support.bitwise import assert_equal, one_step


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Block(nn.Module):
    """Dropout, batch norm, an autograd function in Python, and a branch on what was computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if hidden.mean().item() > 10:
            hidden = 2 * hidden
        return x + self.drop(self.down(Exponential.apply(-hidden * hidden)))


class Branching(nn.Module):
    def __init__(self, n_blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), tokens)


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Branching(), torch.randint(0, 50, (512,))


class BranchingAtTheTop(Branching):
    """There is no submodule that could be one piece."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        return loss if loss.item() < 100 else loss / 2


def test_what_cannot_be_traced_is_told_the_way_out() -> None:
    _, batch = model_and_batch()
    model = BranchingAtTheTop(n_blocks=1)
    with pytest.raises(TraceError, match=r"checkpoint_solver\.fallback\.plan_chain"):
        solve(model, batch, budget="1GB")


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("share", [1.1, 0.8, 0.5])
def test_the_planned_step_keeps_to_the_predicted_peak_and_the_bits(share: float) -> None:
    plain, batch = model_and_batch()
    model = copy.deepcopy(plain)
    plain_bytes = measure(copy.deepcopy(plain), batch, n_steps=1).peak_bytes
    solution = plan_chain(model, batch, budget=int(share * plain_bytes))
    assert solution.scope == SCOPE
    assert solution.simulation == simulate(solution.graph, solution.schedule)
    assert bool(solution.checkpointed) == (share < 1)
    assert solution.simulation.peak_bytes <= solution.request.available_bytes
    apply(model, solution)
    measured = measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes
    assert measured <= solution.simulation.peak_bytes
    for seed in range(2):
        assert_equal(one_step(plain, batch, seed), one_step(model, batch, seed))
    remove(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_planning_changes_nothing() -> None:
    model, batch = model_and_batch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan_chain(model, batch, budget="2MB", optimizer=torch.optim.AdamW)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before.state_dict()[name])
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    hooks = ("_forward_hooks", "_forward_pre_hooks", "forward")
    assert all(not vars(m).get(hook) for m in model.modules() for hook in hooks)


@pytest.mark.slow
def test_planning_holds_nothing_when_it_is_done() -> None:
    """A saved tensor that is kept as it is holds the step that saved it, out of gc's sight."""
    model, batch = model_and_batch()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    plan_chain(model, batch, budget="2MB")
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


@pytest.mark.slow
def test_an_optimizer_is_counted() -> None:
    model, batch = model_and_batch()
    plain = plan_chain(model, batch, budget="100MB")
    with_state = plan_chain(model, batch, budget="100MB", optimizer=torch.optim.AdamW)
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    states = [t.size_bytes for t in with_state.graph.tensors if t.kind == "optimizer_state"]
    assert states == [pytest.approx(2 * n_bytes, rel=0.01)]
    assert with_state.baseline.peak_bytes > plain.baseline.peak_bytes


def test_nothing_fits_is_said() -> None:
    model, batch = model_and_batch()
    solution = plan_chain(model, batch, budget="100KB")
    assert solution.status == "infeasible"
    assert solution.schedule is None
    with pytest.raises(ValueError, match="no schedule"):
        apply(model, solution)


def test_a_model_without_a_row_of_submodules_is_refused() -> None:
    with pytest.raises(FallbackError, match="Linear has no two submodules"):
        plan_chain(nn.Linear(4, 1), torch.randn(3, 4), budget="1MB", loss=lambda y, _: y.sum())


class Scrambled(nn.Module):
    """Called in another order than registered; one block twice; names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for name in "abcd"}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("c", "a", "d", "b", "b"):
            x = self.parts[name](x)
        return x.square().mean()


def test_the_row_is_what_was_called_and_not_what_is_named() -> None:
    model, x = Scrambled(), torch.randn(4, 8)
    assert find_sequences(model, lambda: model(x)) == (("parts.c", "parts.a", "parts.d"),)


class TwoRows(nn.Module):
    """Two rows of blocks of different widths, each run by a module of its own."""

    def __init__(self, n_blocks: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block(16) for _ in range(n_blocks)))
        self.between = nn.Linear(16, 20)
        self.decoder = nn.Sequential(*(Block(20) for _ in range(n_blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.decoder(torch.tanh(self.between(self.encoder(x)))).square().mean()
        return loss if loss.item() < 100 else loss / 2


@pytest.mark.slow
def test_several_rows_are_planned_at_once() -> None:
    torch.manual_seed(0)
    model, x = TwoRows(), torch.randn(512, 16)
    best, both = find_sequences(model, lambda: model(x))
    assert best == ("encoder", "between", "decoder")
    assert both == tuple(f"{row}.{i}" for row in ("encoder", "decoder") for i in range(4))
    plain_bytes = measure(copy.deepcopy(model), x, n_steps=1).peak_bytes
    solution = plan_chain(model, x, budget=int(0.5 * plain_bytes))  # less than one whole row takes
    assert solution.blocks == both
    assert {path.partition(".")[0] for path in solution.checkpointed} == {"encoder", "decoder"}
    planned = apply(copy.deepcopy(model), solution)
    measured_bytes = measure(copy.deepcopy(planned), x, n_steps=1).peak_bytes
    assert measured_bytes <= solution.simulation.peak_bytes <= 0.5 * plain_bytes
    assert_equal(one_step(model, x, 0), one_step(planned, x, 0))


def test_the_pieces_are_what_was_put_by() -> None:
    model, x = Scrambled(), torch.randn(4, 8)
    blocks = ("parts.c", "parts.a", "parts.d")
    observed = observe(model, lambda: model(x), blocks, resident=[x])
    assert tuple(p.path for p in observed.parts) == ("", *sum(((b, "") for b in blocks), ()))
    saved = [sum(observed.storage_bytes[i] for i in p.saved) for p in observed.parts]
    assert saved[1] == 4 * 8 * 4  # tanh's result; the input is the batch
    assert saved[3] == 2 * 4 * 8 * 4  # its input too
    assert all(p.backward_s > 0 for p in observed.parts[1::2])


def test_bytes_are_told_part_by_part() -> None:
    kept = []

    def run() -> None:
        begin_part("one")
        kept.append(torch.empty(1000, dtype=torch.uint8))
        begin_part("two")
        torch.empty(5000, dtype=torch.uint8)
        kept.append(torch.empty(100, dtype=torch.uint8))
        begin_part("one")
        kept.append(torch.empty(2000, dtype=torch.uint8))

    peaks = cpu_peak_bytes_by_part(run)
    assert (peaks["one"], peaks["two"]) == (2000, 5000)


class Returning(Branching):
    """Returns what it computed beside the loss, which is there to the end of the step."""

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return {"loss": F.cross_entropy(scores, tokens), "scores": scores, "squares": x.square()}


@pytest.mark.slow
def test_the_baseline_is_that_of_the_plain_step_whatever_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured times differ from run to run, and so do plans; what a plan takes beyond its
    prediction is no part of the step without a plan."""
    torch.manual_seed(0)
    model, batch = Returning(), torch.randint(0, 50, (512,))
    measured_bytes = ObservedStep(model, batch).peak_bytes(lambda: None)
    assert ObservedStep(model, batch).peak_bytes(lambda: None) == measured_bytes
    honest = ObservedStep.peak_bytes

    def more_with_a_plan(self: ObservedStep, put: Any) -> int:
        put()
        n_planned = sum("forward" in module.__dict__ for module in model.modules())
        if n_planned:
            remove(model)
        return honest(self, put) + 10_000 * n_planned

    monkeypatch.setattr(ObservedStep, "peak_bytes", more_with_a_plan)
    peaks = set()
    for share in (1.5, 0.6):
        found = plan_chain(model, batch, budget=int(share * measured_bytes))
        assert found.schedule is not None
        peaks.add(found.baseline.peak_bytes)
    assert len(peaks) == 1
    assert measured_bytes <= peaks.pop() <= 1.02 * measured_bytes


def test_what_the_last_step_held_is_not_freed_in_the_next() -> None:
    """A measured run sees such a free, or not, by chance."""
    torch.manual_seed(0)
    step = ObservedStep(Returning(), torch.randint(0, 50, (512,)))
    held: list[bool] = []

    def forward() -> torch.Tensor:
        held.append(step._output is not None)
        return step.forward()

    observe(step.model, forward, ("blocks.0", "blocks.1"), release=step.release)
    assert held == [False] * 5


def _with_per_sample_gradients(layer: nn.Linear) -> None:
    """Registers hooks as Opacus does: they count the passes that wait for their backward pass."""
    weight: Any = layer.weight

    def keep(module: Any, args: Any, _output: Any) -> None:
        module.inputs = [*getattr(module, "inputs", []), args[0].detach()]
        weight.n_waiting = getattr(weight, "n_waiting", 0) + 1

    def use(module: Any, _given: Any, gradients: Any) -> None:
        module.per_sample = torch.einsum("ni,nj->nij", gradients[0], module.inputs.pop())
        weight.n_waiting -= 1

    layer.register_forward_hook(keep)
    layer.register_full_backward_hook(use)


def test_hooks_that_count_passes_are_refused_and_left_as_they_were() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
    _with_per_sample_gradients(model[0])
    with pytest.raises(FallbackError, match=r"hooks of submodules \('0' is one\) keep something"):
        plan_chain(model, x, budget="1GB", loss=lambda made, _: made.square().sum())
    assert not hasattr(model[0], "inputs")
    assert not hasattr(model[0].weight, "n_waiting")
    with pytest.raises(TraceError, match=r"forward and backward hooks.* Train without") as caught:
        solve(model, x, budget="1GB", loss=lambda made, _: made.square().sum())
    assert "plan_chain" not in str(caught.value)


def test_hooks_of_both_passes_that_keep_nothing_are_planned() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_full_backward_hook(lambda *_: None)
    assert plan_chain(model, x, budget="1GB", loss=lambda made, _: made.square().sum()).schedule


def test_transforms_of_torch_func_are_refused_with_what_to_do():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            return torch.func.grad(lambda point: self.layers(point).sum())(x).square().mean()

    with pytest.raises(FallbackError, match=r"torch\.func .* solve and apply"):
        plan_chain(Slope(), torch.randn(16, 8), budget="1GB")
