"""Exported steps whose calls of `F.cross_entropy` run in row chunks."""

from __future__ import annotations

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphs.capture import CalledLoss
from graphs.rewrites import STOCK
from graphs.trace import trace
from scheduler_runtime.execute import called_losses
from scheduler_runtime.execute.called_losses import ChunkedCall, ForwardWithChunkedLoss, in_chunks
from scheduler_runtime.export import module_tree, remove_torch_checkpoint, to_torch_checkpoint
from scheduler_runtime.measuring import measure
from solver import solve
from solver.module_checkpointing import plan_regions
from tests.support.bitwise import (
    assert_bitwise_identical,
    assert_equal,
    assert_same_gradients,
    one_step,
)

N_ROWS, WIDTH, N_CLASSES = 1024, 32, 4096
SCALARS_BYTES = 100
"""What eager mode allocates for numbers, such as the gradient of the loss."""


class Classifier(nn.Module):
    """Blocks with something to drop, and a head; `loss` is of logits and targets."""

    def __init__(self, loss: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, N_CLASSES, bias=False)
        self.loss = loss
        self.to(dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.loss(self.head(x), y)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(N_CLASSES, (N_ROWS,), generator=generator)
    y[::5] = -100
    return torch.randn(N_ROWS, WIDTH, generator=generator).to(dtype), y


def mean(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y)


def by_rows(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y, reduction="none").square().mean()


def with_logits(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(logits, y), logits


def in_float(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits.float() / 2, y)


def twice(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits * 2, y) + F.cross_entropy(logits, y.flip(0), reduction="sum")


LOSSES = {mean: 0.75, by_rows: 0.75, with_logits: 0.75, in_float: 0.9, twice: 0.8}
"""With the budget of a test as a share of the plain step's peak."""


def exported(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, share: float = 1.0) -> Any:
    """The export within a share of what is between resident and least bytes without recomputing, of
    the steps with a loss in chunks."""
    graphs = [trace(model, (x, y), rewrites=variant) for variant in STOCK]
    assert all(graph.meta.called_losses for graph in graphs)
    plain = solve(model, (x, y), budget="1GB", rewrites="none")
    solution = solve(model, (x, y), budget=int(share * plain.baseline.peak_bytes))
    return to_torch_checkpoint(model, solution)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_in_chunks_with_the_same_bits_in_the_bytes_that_were_predicted(
    loss: Any,
) -> None:
    plain, (x, y) = Classifier(loss), batch()
    model = copy.deepcopy(plain)
    export = exported(model, x, y, share=LOSSES[loss])
    assert export.losses_in_chunks == (2 if loss is twice else 1)
    assert "F.cross_entropy in row chunks" in str(export)
    assert isinstance(model.forward, ForwardWithChunkedLoss)
    assert export.fits
    measured = measure(copy.deepcopy(model), (x, y), n_steps=1).peak_bytes
    assert export.peak_bytes * 0.99 <= measured <= export.peak_bytes + SCALARS_BYTES
    assert_bitwise_identical(plain, pickle.loads(pickle.dumps(model)), (x, y))
    export.remove()
    assert "forward" not in vars(model)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "variant"), list(itertools.product(LOSSES, STOCK)))
def test_each_variant_takes_what_was_predicted(loss: Any, variant: Any) -> None:
    model, (x, y) = Classifier(loss), batch()
    graph = trace(model, (x, y), rewrites=variant)
    predicted = plan_regions(graph, ()).peak_bytes
    model.forward = ForwardWithChunkedLoss(model, graph.meta.called_losses)
    measured = measure(model, (x, y), n_steps=1).peak_bytes
    assert predicted * 0.99 <= measured <= predicted + SCALARS_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_and_autocast(dtype: torch.dtype) -> None:
    plain, (x, y) = Classifier(in_float, dtype), batch(dtype)
    model = copy.deepcopy(plain)
    assert exported(model, x, y, share=0.9).losses_in_chunks == 1
    assert_equal(one_step(plain, (x, y), 0), one_step(model, (x, y), 0))
    if dtype == torch.bfloat16:
        plain, (x, y) = Classifier(mean), batch()
        model = copy.deepcopy(plain)
        with torch.autocast("cpu", dtype):
            assert exported(model, x, y, share=0.9).losses_in_chunks == 1
        for each in (plain, model):
            with torch.autocast("cpu", dtype):
                loss = each(x, y)
            loss.backward()
        assert_same_gradients(plain, model)


@pytest.mark.slow
def test_a_budget_below_that_of_the_plain_step_is_kept_to() -> None:
    plain, (x, y) = Classifier(mean), batch()
    alone = solve(plain, (x, y), budget="1KB", rewrites="none")
    budget = int(0.8 * alone.minimum_budget_bytes)
    model = copy.deepcopy(plain)
    export = to_torch_checkpoint(model, solve(model, (x, y), budget=budget))
    assert (
        measure(copy.deepcopy(model), (x, y), n_steps=1).peak_bytes <= export.peak_bytes <= budget
    )
    assert_bitwise_identical(plain, model, (x, y))
    remove_torch_checkpoint(model)
    step = to_torch_checkpoint(model, solve(model, (x, y), budget="1GB", rewrites="none"))
    assert step.losses_in_chunks == 0


def smoothed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def weighted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y, weight=torch.ones(N_CLASSES))


def by_hand(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits, 1), y)


def of_few(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:300], y[:300])


@pytest.mark.slow
@pytest.mark.parametrize("loss", [smoothed, weighted, by_hand, of_few])
def test_others_are_left_alone(loss: Any) -> None:
    model, (x, y) = Classifier(loss), batch()
    for variant in STOCK:
        assert not trace(model, (x, y), rewrites=variant).meta.called_losses


@pytest.mark.slow
def test_a_second_backward_pass_is_refused_and_another_shape_is_computed() -> None:
    plain, (x, y) = Classifier(mean), batch()
    model = copy.deepcopy(plain)
    exported(model, x, y, share=0.75)
    loss = model(x, y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"create_graph=True .* rewrites=.none"):
        torch.autograd.grad(model(x, y), model.head.weight, create_graph=True)
    assert_bitwise_identical(plain, model, (x[:600], y[:600]))
    with torch.no_grad():
        assert torch.equal(plain(x, y), model(x, y))


class Flagged(Classifier):
    """The planned call has no flag; what another does with it is `mode`."""

    def __init__(self, mode: str) -> None:
        super().__init__(mean)
        self.aux = nn.Linear(WIDTH, N_CLASSES, bias=False)
        self.mode = mode
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor, flag: bool = False) -> Any:
        loss: Any = 0
        if flag and self.mode == "another loss in front":
            logits = self.aux(x)
            loss = F.cross_entropy(logits, y)
            x = x + logits[:, :WIDTH]
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        loss = loss + F.cross_entropy(logits, y)
        if flag and self.mode == "attribute":
            self.seen = logits.detach()
        if flag and self.mode == "accuracy":
            return loss, logits.max(1).values.sum().detach()
        if flag and self.mode == "returned":
            return loss, logits
        return loss


FLAGGED = ("accuracy", "another loss in front", "attribute", "returned")


def _step_with_flag(model: Flagged, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor | None]:
    """Results, gradients, and what an attribute and a hook have seen, after the backward pass."""
    seen: list[torch.Tensor] = []
    hook = model.head.register_forward_hook(lambda _module, _args, logits: seen.append(logits))
    output = model(x, y, flag=True)
    results = output if isinstance(output, tuple) else (output,)
    results[0].backward()
    hook.remove()
    return [*results, *(p.grad for p in model.parameters()), model.seen, *seen]


@pytest.mark.slow
@pytest.mark.parametrize("variant", STOCK)
@pytest.mark.parametrize("mode", FLAGGED)
def test_calls_that_read_the_logits_otherwise_than_the_planned_one(mode: str, variant: Any) -> None:
    plain, (x, y) = Flagged(mode), batch()
    model = copy.deepcopy(plain)
    calls = trace(model, (x, y), rewrites=variant).meta.called_losses
    model.forward = ForwardWithChunkedLoss(model, calls)
    for one, other in zip(_step_with_flag(plain, x, y), _step_with_flag(model, x, y), strict=True):
        assert one is other is None or torch.equal(one, other)
    for each in (plain, model):
        each.zero_grad()
    assert_bitwise_identical(plain, model, (x, y))


def _loss_and_gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.slow
@pytest.mark.parametrize("variant", STOCK)
def test_where_calls_come_from(monkeypatch, variant: Any) -> None:
    """In chunks are those of the model's own forward; never a caller's, or what is called again."""
    plain, (x, y) = Classifier(mean), batch()
    model = copy.deepcopy(plain)
    calls = trace(model, (x, y), rewrites=variant).meta.called_losses
    model.forward = ForwardWithChunkedLoss(model, calls)
    model(x, y)  # tries the device
    runs: list[int] = []
    original = called_losses.in_chunks
    monkeypatch.setattr(
        called_losses, "in_chunks", lambda *a, **k: (runs.append(1), original(*a, **k))[1]
    )

    def outside(each: nn.Module) -> torch.Tensor:
        logits = nn.functional.linear(x, each.head.weight)
        return each(x, y) + F.cross_entropy(logits, y)

    def in_thread(each: nn.Module) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda _: each(x, y), range(2)))

    def checkpointed(each: nn.Module) -> torch.Tensor:
        return checkpoint(each, x, y, use_reentrant=False)

    def offloaded(each: nn.Module) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return each(x, y)

    def compiled(each: nn.Module) -> torch.Tensor:
        return torch.compile(each, backend="eager")(x, y)

    ways = {outside: 1, in_thread: 2, checkpointed: 0, offloaded: 0, compiled: 0}
    for way, n_runs in ways.items():
        expected = _loss_and_gradients(plain, way(plain))
        runs.clear()
        found = _loss_and_gradients(model, way(model))
        assert_equal(expected, found)
        assert len(runs) == n_runs, way
    parameters = dict(model.named_parameters())
    by_func = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x, y)))(parameters)
    expected = _loss_and_gradients(plain, plain(x, y))[1:]
    assert_equal(expected, by_func.values())
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model(x, torch.full_like(y, N_CLASSES))
    F.cross_entropy(torch.randn(N_ROWS, N_CLASSES, requires_grad=True), y).backward()
    assert len(runs) == n_runs + 1  # the one that raised: no mode is left behind


class LossInBlocks(nn.Module):
    """Each block has a loss of its own, whose logits would be recomputed with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Classifier(mean) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(block(x, y) for block in self.blocks)


@pytest.mark.slow
def test_a_module_that_calls_a_loss_in_chunks_is_not_checkpointed() -> None:
    model, (x, y) = LossInBlocks(), batch()
    for variant in STOCK:
        graph = trace(model, (x, y), rewrites=variant)
        assert {call["module"] for call in graph.meta.called_losses} == {"blocks.0", "blocks.1"}
        tree = module_tree(model, graph)
        assert not {"blocks.0", "blocks.1"}.intersection((*tree.blocks, *tree.around))


def written(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, y)
    logits.detach().clamp_(max=1)
    return loss


@pytest.mark.slow
def test_logits_that_forward_writes_after_the_loss_are_not_what_is_kept() -> None:
    plain, (x, y) = Classifier(written), batch()
    calls = [trace(plain, (x, y), rewrites=variant).meta.called_losses for variant in STOCK]
    assert [[call["keeps"] for call in each] for each in calls] == [[True], []]
    model = copy.deepcopy(plain)
    model.forward = ForwardWithChunkedLoss(model, calls[0])
    assert_bitwise_identical(plain, model, (x, y))


@pytest.mark.parametrize("seed", range(4))
def test_chunks_have_the_bits_of_the_whole(seed: int) -> None:
    """Odd sizes, dtypes, reductions; gradients of every kind of upstream."""
    generator = torch.Generator().manual_seed(seed)
    for reduction, keeps in itertools.product(("mean", "sum", "none"), (True, False)):
        n_rows = int(torch.randint(1, 300, (), generator=generator))
        n_classes = int(torch.randint(2, 300, (), generator=generator))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        computed_in = torch.float32 if n_rows % 2 else dtype
        numbers = torch.randn(n_rows, n_classes, generator=generator).to(dtype)
        y = torch.randint(n_classes, (n_rows,), generator=generator)
        y[torch.rand(n_rows, generator=generator) < 0.2] = -100
        found = []
        for in_rows in (False, True):
            leaf = numbers.clone().requires_grad_()
            logits = leaf * 1
            if in_rows:
                words = (str(each).removeprefix("torch.") for each in (dtype, computed_in))
                call = ChunkedCall(0, keeps, n_classes, *words)
                about = CalledLoss(logits, y, reduction, -100)
                value = in_chunks(about, call, chunk_rows=64)
            else:
                value = F.cross_entropy(logits.to(computed_in), y, reduction=reduction)
            kept = logits.detach().clone()
            value.backward(torch.linspace(0.5, 2, value.numel()).view(value.shape).to(value.dtype))
            assert torch.equal(logits, kept)
            found += [(value.detach(), leaf.grad, logits.detach())]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_device_that_rounds_otherwise_in_chunks_is_told(monkeypatch) -> None:
    model, (x, y) = Classifier(mean), batch()
    exported(model, x, y, share=0.75)
    original = called_losses._write_gradient

    def wrong(kept: Any, loss: Any, made: torch.Tensor, form: Any) -> None:
        original(kept, loss, made, form)
        made.mul_(1 + 1e-6)

    monkeypatch.setattr(called_losses, "_write_gradient", wrong)
    called_losses.check_bits.cache_clear()
    with pytest.raises(RuntimeError, match=r'not bitwise identical to .* rewrites="none"'):
        model(x, y)
    called_losses.check_bits.cache_clear()
