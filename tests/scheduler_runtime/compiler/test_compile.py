"""torch.compile within a budget: the peak is kept, the bits are the same, nothing is silent."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphs.model_calls.call import TraceError
from scheduler_runtime import (
    GraphBreakError,
    compile,
    compile_reports,
    fit,
    measure,
    remove,
    uncompile,
)
from scheduler_runtime.compiler import partitioner as partitioner_module
from scheduler_runtime.compiler.backends import backend_of
from scheduler_runtime.compiler.partitioner import BudgetPartitioner
from solver.sizes_deadlines_progress.sizes import BudgetError
from solver.solving import answer
from tests.support.models import NormAndDropout, TiedLanguageModel


class Perceptrons(nn.Module):
    """Residual blocks with norm and dropout: most of the step is activations."""

    def __init__(self, n_blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(n_blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(n_blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), 0.1)
        return x.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(64, 64, 32, generator=torch.Generator().manual_seed(0))


class Convolutions(nn.Module):
    """Batch norm, whose buffers change once however often its convolution runs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(3 if not i else 8, 8, 3, padding=1) for i in range(5)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return x.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def bits(model: nn.Module, batch, call, *, n_steps: int = 2) -> dict[str, torch.Tensor]:
    """Loss, gradients (added up) and buffers after steps from the same random state."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = None
    kwargs = batch if isinstance(batch, dict) else {}
    args = () if isinstance(batch, dict) else (batch,)
    for _ in range(n_steps):
        output = call(*args, **kwargs)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
    found = {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return {"loss": loss.detach(), **{name: t.detach().clone() for name, t in found.items()}}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def plainly(model: nn.Module, backend: str):
    """torch.compile with the same backend and PyTorch's own partition."""
    partitioner = BudgetPartitioner(budget_bytes=None)
    return torch.compile(
        model, backend=backend_of(backend, partitioner), fullgraph=True, dynamic=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Perceptrons, Convolutions, TiedLanguageModel])
def test_the_budget_is_kept_and_the_bits_are_those_without_one(kind):
    torch.manual_seed(0)
    model, batch = kind(), kind.batch()
    twin = copy.deepcopy(model)
    plain = bits(twin, batch, plainly(twin, "aot_eager"))
    before_bytes = measure(twin, batch, n_steps=1).peak_bytes

    free = compile(copy.deepcopy(model), batch, budget="1GB", backend="aot_eager")
    (report,) = compile_reports(free)
    assert report.chosen.partition.n_recomputed == 0
    assert len(report.attempts) == 1
    free_saved_bytes = report.chosen.partition.saved_bytes

    least = report.chosen.partition.solution.graph.resident_bytes
    budget_bytes = least + int(0.85 * (report.chosen.measured_bytes - least))
    compile(model, batch, budget=budget_bytes, backend="aot_eager", max_attempts=8)
    (report,) = compile_reports(model)
    assert report.chosen.partition.n_recomputed > 0
    assert report.chosen.partition.saved_bytes < free_saved_bytes
    assert same_bits(bits(model, batch, model), plain)
    for parameter in model.parameters():
        parameter.grad = None
    measured_bytes = measure(model, batch, n_steps=1).peak_bytes
    assert measured_bytes <= budget_bytes < before_bytes


class RunningScale(nn.Module):
    """Reads a buffer, in a form that is cheap to recompute, before it overwrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            y = linear(x)
            x = F.gelu(y * self.scale.rsqrt()) * y.sigmoid()
            with torch.no_grad():
                self.scale.mul_(0.5).add_(y.abs().mean(0))
        return x.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def recomputing(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    """The model, compiled with aot_eager for a budget at which it has to recompute."""
    compile(model, batch, budget="1GB", reserve=0, backend="aot_eager")
    (free,) = compile_reports(model)
    budget_bytes = free.chosen.measured_bytes - free.chosen.partition.saved_bytes // 4
    compile(uncompile(model), batch, budget=budget_bytes, reserve=0, backend="aot_eager")
    assert compile_reports(model)[0].chosen.partition.n_recomputed > 0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("n_passes", [1, 2])
@pytest.mark.parametrize(
    ("kind", "reference"), [(Convolutions, plainly), (RunningScale, lambda model, _: model)]
)
def test_recomputations_read_buffers_as_they_were_in_the_forward_pass(kind, reference, n_passes):
    """torch.compile itself recomputes `rsqrt` from the new values, or fails after two passes."""
    torch.manual_seed(0)
    plain, batch = kind(), kind.batch()
    model = recomputing(copy.deepcopy(plain), batch)
    results = []
    for each, call in ((plain, reference(plain, "aot_eager")), (model, model)):
        sum(call(batch + n) for n in range(n_passes)).backward()
        results.append([*(p.grad for p in each.parameters()), *each.buffers()])
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_a_second_backward_pass_needs_the_setting_that_torch_compile_needs():
    torch.manual_seed(0)
    model, batch = Convolutions(), Convolutions.batch()
    loss = recomputing(copy.deepcopy(model), batch)(batch)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        loss.backward(retain_graph=True)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = recomputing(model, batch)(batch)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


@pytest.mark.slow
def test_inductor_keeps_the_budget():
    torch.manual_seed(0)
    model, batch = Perceptrons(n_blocks=2), Perceptrons.batch()
    compile(model, batch, budget="1GB", backend="inductor")
    (free,) = compile_reports(model)
    assert free.chosen.partition.n_recomputed == 0
    plain = bits(model, batch, model)
    before_bytes = free.chosen.measured_bytes
    budget_bytes = before_bytes - free.chosen.partition.saved_bytes // 3
    compile(uncompile(model), batch, budget=budget_bytes, backend="inductor")
    (report,) = compile_reports(model)
    assert report.chosen.measured_bytes <= budget_bytes < report.attempts[0].measured_bytes
    planned = bits(model, batch, model)
    for name, value in plain.items():  # other fusions may round otherwise
        torch.testing.assert_close(planned[name], value, msg=name)


@pytest.mark.slow
def test_rehearsing_leaves_no_trace():
    torch.manual_seed(0)
    model, batch = NormAndDropout(), NormAndDropout.batch()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    compile(model, batch, budget="1GB", backend="aot_eager")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_budget_is_rounded_down_to_bytes():
    model, batch = Perceptrons(n_blocks=1), Perceptrons.batch()
    compile(model, batch, budget=0.85 * (10**9 + 1), backend="aot_eager")
    assert compile_reports(model)[0].budget_bytes == 850_000_000


@pytest.mark.slow
def test_each_attempt_is_told_before_it_begins(caplog):
    model, batch = Perceptrons(), Perceptrons.batch()
    with caplog.at_level(logging.INFO, "checkpoint_solver"):
        compile(model, batch, budget="1GB", backend="aot_eager")
    told, *_ = caplog.messages
    assert "Perceptrons, attempt 1 of at most 5, PyTorch's partition" in told


@pytest.mark.slow
def test_without_a_batch_the_first_training_step_is_the_rehearsal():
    torch.manual_seed(0)
    model, batch = Perceptrons(), Perceptrons.batch()
    model.eval()  # as a library hands models out
    compile(model, budget="1GB", backend="aot_eager")
    assert compile_reports(model) == ()
    model(batch)
    assert compile_reports(model) == ()
    model.train()
    model(batch).backward()
    assert len(compile_reports(model)) == 1
    model(batch[:8]).backward()
    assert len(compile_reports(model)) == 2
    uncompile(model)
    assert "forward" not in model.__dict__


def test_a_forward_that_counts_its_calls_is_refused():
    class Counts(nn.Linear):
        n_calls = 0

        def forward(self, x):
            self.n_calls += 1
            return super().forward(x).sum()

    model = Counts(4, 4)
    with pytest.raises(TraceError, match="changes the attribute 'n_calls'"):
        compile(model, torch.randn(2, 4), budget="1GB", backend="aot_eager")
    assert model.n_calls == 0


def test_a_module_has_one_plan():
    model, batch = nn.Linear(4, 1), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters())
    compile(model, budget="1GB", backend="aot_eager")
    with pytest.raises(ValueError, match="already has a plan"):
        fit(model, budget="1GB", optimizer=optimizer)
    remove(model)
    assert "forward" not in model.__dict__
    fit(model, budget="1GB", optimizer=optimizer)
    with pytest.raises(ValueError, match="already has a plan"):
        compile(model, batch, budget="1GB", backend="aot_eager")


def test_a_model_in_evaluation_mode_is_warned_of():
    model, batch = Perceptrons(n_blocks=1).eval(), Perceptrons.batch()
    with pytest.warns(UserWarning, match="evaluation mode"):
        compile(model, batch, budget="1GB", backend="aot_eager")
    model(batch).backward()
    assert len(compile_reports(model)) == 1


def test_a_graph_break_is_an_error_that_says_where():
    class Breaks(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x).sum()

    with pytest.raises(GraphBreakError, match="Breaks"):
        compile(Breaks(4, 4), torch.randn(2, 4), budget="1GB", backend="aot_eager")


@pytest.mark.slow
def test_a_checkpoint_around_the_module_recomputes_it():
    model, batch = Perceptrons(), Perceptrons.batch().requires_grad_()
    compile(model, batch, budget="1GB", backend="aot_eager")
    calls = []

    def counted(x):
        calls.append(x)
        return model(x)

    checkpoint(counted, batch, use_reentrant=False).backward()
    assert len(calls) == 2


@pytest.mark.slow
def test_what_cannot_fit_says_what_was_reached():
    model, batch = Perceptrons(n_blocks=1), Perceptrons.batch()
    with pytest.raises(BudgetError, match="the smallest measured peak is"):
        compile(model, batch, budget="600kB", backend="aot_eager")
    assert "forward" not in model.__dict__


def test_the_least_plan_is_measured_if_a_search_cannot_find_it_again(monkeypatch):
    """On a busy machine the time limit ended the search for the budget that it had just found."""

    def out_of_time(step, request, *, starts=()):
        finds_it = starts or request.budget_bytes == 2**60
        asked = request if finds_it else dataclasses.replace(request, budget_bytes=1)
        found = dataclasses.replace(answer(step, asked, starts=starts), request=request)
        if found.obstacle is None:
            return found
        late = dataclasses.replace(found.obstacle, cut_short=True)
        return dataclasses.replace(found, obstacle=late)

    monkeypatch.setattr(partitioner_module, "answer", out_of_time)
    model, batch = Perceptrons(n_blocks=2), Perceptrons.batch()
    with pytest.raises(BudgetError, match=r"in 2 attempts.*a larger time_limit_s"):
        compile(model, batch, budget="600kB", backend="aot_eager")


def test_a_loss_outside_and_the_optimizer_count():
    model, batch = nn.Linear(300, 300), (torch.randn(4, 300), torch.randn(4, 300))
    options = {
        "budget": "100MB",
        "backend": "aot_eager",
        "inputs": lambda batch: (batch[0],),
        "loss": lambda output, batch: F.mse_loss(output, batch[1]),
    }
    compile(model, batch, **options)
    (without,) = compile_reports(model)
    optimizer = torch.optim.AdamW(model.parameters())
    compile(uncompile(model), batch, optimizer=optimizer, **options)
    (with_state,) = compile_reports(model)
    two_moments = 2 * 4 * (300 * 300 + 300)
    more_bytes = with_state.chosen.measured_bytes - without.chosen.measured_bytes
    assert two_moments <= more_bytes <= two_moments + 1000  # and the step counts


def test_an_optimizer_that_does_not_fit_is_told_before_anything_is_compiled():
    model, batch = nn.Linear(300, 300), torch.randn(4, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError, match="the optimizer's step alone takes"):
        compile(model, batch, budget="1MB", optimizer=optimizer, backend="aot_eager")


def test_another_compilation_than_the_measured_one_is_warned_of(caplog):
    model, batch = Perceptrons(n_blocks=1), Perceptrons.batch()
    partitioner = BudgetPartitioner(budget_bytes=None)
    call = torch.compile(
        model, backend=backend_of("aot_eager", partitioner), fullgraph=True, dynamic=False
    )
    call(batch)
    partitioner.seal()
    with caplog.at_level(logging.WARNING):
        call(batch[:3])
    assert "its peak is not measured" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "1GB", "backend": "fast"}, "inductor, aot_eager"),
        ({"budget": "1GB", "max_attempts": 0}, "at least 1"),
        ({"budget": 0.85}, "less than a byte"),
        ({"budget": float("nan")}, "not a finite number"),
        ({"budget": "1GB", "reserve": "1GB"}, "smaller reserve: reserve=0 leaves"),
        ({"budget": "1GB", "loss": lambda o, b: o}, "with a batch"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    batch = None if "loss" in options else torch.randn(1, 4)
    with pytest.raises(ValueError, match=message):
        compile(nn.Linear(4, 1), batch, **options)
