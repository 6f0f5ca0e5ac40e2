"""The loss in row chunks: the same bits as the plain step, and what it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphs.costs import cpu_peak_bytes
from graphs.rewrites import chunk_sizes
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.program import build_program
from solver.schedule import Compute, Schedule, baseline, simulate
from tests.support.bitwise import assert_equal
from tests.support.budgets import baseline_peak_bytes
from tests.support.plain_simulator import assert_simulators_agree
from tests.support.wide_logits import IGNORED, N_ROWS, Head, batch, captured, results, rows

BOTH = ("chunked_loss", "chunked_loss_backward")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 1)


def of_hugging_face(logits: torch.Tensor, y: torch.Tensor) -> Any:
    y = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(*rows(logits.float(), y)), logits


def shifted(logits: torch.Tensor, y: torch.Tensor) -> Any:
    logits = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(*rows(logits, y[..., 1:].contiguous()))


def with_z_loss(logits: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(*rows(logits, y)) + 1e-4 * (torch.logsumexp(logits, -1) ** 2).mean()


def probabilities(y: torch.Tensor, n_classes: int = 131) -> torch.Tensor:
    """Of a teacher: most of the weight is on the target."""
    one_hot = F.one_hot(y.clamp(0).view(-1), n_classes)
    return 0.9 * one_hot + 0.1 / n_classes


def log_probabilities(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the targets, by row; 0 where they are ignored."""
    picked = F.log_softmax(logits.float(), -1).gather(-1, y.clamp(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(y == IGNORED, 0.0, picked)


def preferred(logits: torch.Tensor, y: torch.Tensor) -> Any:
    by_sequence = log_probabilities(logits, y).sum(-1)
    return -F.logsigmoid(0.1 * (by_sequence[:1] - by_sequence[1:])).mean()


def of_a_teacher(logits: torch.Tensor, y: torch.Tensor) -> Any:
    """The cross-entropy of each row with a teacher's probabilities."""
    teacher = probabilities(y, logits.shape[-1]).view(logits.shape)
    return -(teacher * F.log_softmax(logits / 2, -1)).sum(-1).mean()


def masked_by_hand(logits: torch.Tensor, y: torch.Tensor) -> Any:
    """The mask has a column for each class."""
    is_target = F.one_hot(y.clamp(0), logits.shape[-1]).bool()
    by_row = (F.log_softmax(logits, -1) * is_target).sum(-1, keepdim=True)
    return -(by_row.squeeze(-1) * (y != IGNORED)).sum(1).mean()


def with_entropy(logits: torch.Tensor, y: torch.Tensor) -> Any:
    logs = F.log_softmax(logits, -1)
    entropy = -(logs.exp() * logs).sum(-1)
    return -(logs.gather(-1, y.clamp(0).unsqueeze(-1)).squeeze(-1) + 0.01 * entropy).mean()


def negative_log_likelihoods(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By row, without a log-softmax."""
    return torch.logsumexp(logits, -1) - logits.gather(-1, y.clamp(0).unsqueeze(-1)).squeeze(-1)


def mean_of_those_that_count(logits: torch.Tensor, y: torch.Tensor) -> Any:
    counts = y != IGNORED
    return (negative_log_likelihoods(logits.float() / 2, y) * counts).sum() / counts.sum()


def indexed(logs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One of each row. The ignored target is a class too: -100 counts from the last."""
    return logs[torch.arange(len(logs)), y]


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda x, y: F.cross_entropy(*rows(x, y)),
    "sum": lambda x, y: F.cross_entropy(*rows(x, y), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(*rows(x, y), reduction="none").square().mean(),
    "another ignored class": lambda x, y: F.cross_entropy(*rows(x, y.clamp(0)), ignore_index=5),
    "class 0 is ignored": lambda x, y: F.cross_entropy(*rows(x, y.clamp(0)), ignore_index=0),
    "smoothed": lambda x, y: F.cross_entropy(*rows(x, y), label_smoothing=0.1),
    "smoothed, by row": lambda x, y: F.cross_entropy(
        *rows(x, y), label_smoothing=0.1, reduction="none"
    ).sum(),
    "temperature": lambda x, y: F.cross_entropy(*rows(x / 3.0, y)),
    "Hugging Face": of_hugging_face,
    "shifted": shifted,
    "z-loss": with_z_loss,
    "two losses": lambda x, y: (
        F.cross_entropy(*rows(x, y)) + F.cross_entropy(*rows(x / 2, y.flip(-1)), reduction="sum")
    ),
    "distillation beside targets": lambda x, y: (
        LOSSES["mean"](x, y)
        + F.kl_div(F.log_softmax(rows(x, y)[0] / 2, -1), probabilities(y), reduction="batchmean")
    ),
    "log-probabilities by hand": lambda x, y: -log_probabilities(x, y).mean(),
    "preferences": preferred,
    "several classes of a row": lambda x, y: (
        -(
            F.log_softmax(x, -1)
            .gather(-1, torch.stack((y.clamp(0), y.flip(-1).clamp(0)), -1))
            .mean()
        )
    ),
    "gathered and smoothed by hand": lambda x, y: (
        -(
            (p := F.log_softmax(rows(x, y)[0], -1)).gather(1, y.clamp(0).view(-1, 1)).mean()
            + 0.01 * p.sum(-1).mean()
        )
    ),
    "teacher, by row": of_a_teacher,
    "sequences of one token": lambda x, y: (
        -(F.log_softmax(x.view(-1, 1, 131), -1) * probabilities(y).unsqueeze(1)).sum(-1).mean()
    ),
    "a mask of classes": masked_by_hand,
    "the log of the sum, by hand": lambda x, y: negative_log_likelihoods(x, y).mean(),
    "the log of the sum, masked": mean_of_those_that_count,
    "the log of the sum, indexed": lambda x, y: (
        torch.logsumexp(rows(x, y)[0], -1) - indexed(*rows(x, y))
    ).mean(),
    "two sums of the same logits": lambda x, y: (
        negative_log_likelihoods(x, y).mean() + 1e-3 * torch.logsumexp(x, -1).square().sum()
    ),
    "log-probabilities by index": lambda x, y: (
        -(indexed(F.log_softmax(rows(x, y)[0], -1), y.view(-1)) * (y.view(-1) != IGNORED)).mean()
    ),
    "entropy": with_entropy,
    "log-softmax is returned": lambda x, y: (
        F.nll_loss(p := F.log_softmax(rows(x, y)[0], -1), y.view(-1)),
        p,
    ),
}
SOFTMAX_STAYS = {"entropy", "log-softmax is returned"}
"""Something reads it whole."""


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_every_bit_is_that_of_the_plain_step(dtype, autocast, loss) -> None:
    x, y = batch()
    model, x = Head(LOSSES[loss]).to(dtype), x.to(dtype)

    def plain() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(x, y)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        traced, call = captured(model, x, y, (), costs=None)
        steps = [traced.with_rewrites((rewrite,)) for rewrite in BOTH]
    expected = results(model, plain)
    for step in steps:
        program = BoundProgram(step, build_program(step, baseline(step.graph)))
        got = results(model, lambda: program.run(model, call))  # noqa: B023
        assert_equal(got, expected)
    chunked = [any(n.op.startswith("row_chunks") for n in step.graph.nodes) for step in steps]
    assert chunked == [loss not in SOFTMAX_STAYS, True] or loss == "log-softmax is returned"


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize("rewrite", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_classes", [1000, 1013, 4099])
@pytest.mark.parametrize("loss", ["Hugging Face", "the log of the sum, by hand", "z-loss"])
def test_odd_widths_and_several_threads_change_no_bit(loss, n_classes, dtype, rewrite) -> None:
    x, y = batch(n_classes)
    model, x = Head(LOSSES[loss], n_classes).to(dtype), x.to(dtype)
    step, call = captured(model, x, y, (rewrite,))
    program = BoundProgram(step, build_program(step, baseline(step.graph)))
    n_threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            expected = results(model, lambda: model(x, y))
            got = results(model, lambda: program.run(model, call))
            assert_equal(got, expected)
    finally:
        torch.set_num_threads(n_threads)


def ignoring(first: int, second: int) -> Callable[..., torch.Tensor]:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = F.cross_entropy(*rows(logits, y.clamp(0)), ignore_index=first)
        return one + F.cross_entropy(*rows(logits / 3, y.clamp(0)), ignore_index=second)

    return loss


@pytest.mark.slow
def test_losses_that_differ_in_a_number_only_are_not_taken_for_one_another() -> None:
    x, y = batch()
    for loss in (ignoring(5, 5), ignoring(5, 7), ignoring(7, 5)):
        model = Head(loss)
        step, call = captured(model, x, y, ("chunked_loss", "in_place"))
        program = BoundProgram(step, build_program(step, baseline(step.graph)))
        expected = results(model, lambda: model(x, y))  # noqa: B023
        got = results(model, lambda: program.run(model, call))  # noqa: B023
        assert_equal(got, expected)


@pytest.mark.parametrize(
    ("n_rows", "n_rows_each"),
    [
        (256, [64, 64, 64, 64]),
        (257, [64, 64, 64, 48, 17]),
        (271, [64, 64, 64, 48, 31]),
        (272, [64, 64, 64, 64, 16]),
        (300, [64, 64, 64, 64, 44]),
    ],
)
def test_no_chunk_is_of_a_few_rows(n_rows, n_rows_each) -> None:
    starts = chunk_sizes.chunk_starts(n_rows, 64)
    assert [b - a for a, b in pairwise([*starts, n_rows])] == n_rows_each
    assert all(start % chunk_sizes.LEAST_LAST_ROWS == 0 for start in starts)


@pytest.mark.slow
def test_a_row_that_is_left_over_is_added_up_as_among_others() -> None:
    """PyTorch shares the sum of a single wide row among threads, which changes its last bits."""

    def of_a_teacher(logits: torch.Tensor, y: torch.Tensor) -> Any:
        by_row = -(y * F.log_softmax(logits, -1)).sum(-1)
        return by_row.mean(), by_row

    n_classes = 50_257
    torch.manual_seed(0)
    x, y = torch.randn(257, 8), torch.randn(257, n_classes).softmax(-1)
    model = Head(of_a_teacher, n_classes)
    step, call = captured(model, x, y, ("chunked_loss",))
    assert any(n.op.startswith("row_chunks") for n in step.graph.nodes)
    program = BoundProgram(step, build_program(step, baseline(step.graph)))
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for _ in range(4):
            x.mul_(1.3)
            expected = results(model, lambda: model(x, y))
            got = results(model, lambda: program.run(model, call))
            assert_equal(got, expected)
    finally:
        torch.set_num_threads(n_threads)


def test_the_plain_step_and_what_is_captured_do_not_change() -> None:
    model, (x, y) = Head(LOSSES["mean"]), batch()
    step, _ = captured(model, x, y, ())
    before = str(step.captured.graph)
    chunked = step.with_rewrites(("chunked_loss",))
    assert str(step.captured.graph) == before
    assert chunked.graph.graph_id != step.graph.graph_id
    assert chunked.with_rewrites(()).graph.graph_id == step.graph.graph_id
    assert chunked.graph.graph_id == captured(model, x, y, ("chunked_loss",))[0].graph.graph_id


@pytest.mark.slow
def test_one_wide_tensor_is_left_beside_the_logits() -> None:
    """Plain: logits, log-softmax and two gradients, three at a time."""
    model, (x, y) = Head(LOSSES["mean"], 4096), batch(4096)
    wide, chunk = 4 * N_ROWS * 4096, 4 * 64 * 4096
    peaks = []
    for rewrites in ((), ("chunked_loss_backward",), ("chunked_loss",)):
        graph = captured(model, x, y, rewrites)[0].graph
        peaks.append(baseline_peak_bytes(graph) - graph.resident_bytes)
    plain, kept, recomputed = peaks
    assert plain > 3 * wide
    assert 2 * wide < kept < 2.1 * wide + 2 * chunk
    assert 2 * wide < recomputed < 2.1 * wide + 2 * chunk


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("loss", "n_chunks"),  # of workspace
    [
        ("mean", 2),
        ("preferences", 2),
        ("log-probabilities by index", 2),
        ("the log of the sum, indexed", 3),
    ],
)
def test_the_gradient_is_written_over_the_logits(loss, n_chunks) -> None:
    """One wide tensor at a time, and the workspace of a chunk; what touches it runs once."""
    model, (x, y) = Head(LOSSES[loss], 4096), batch(4096)
    wide, chunk = 4 * N_ROWS * 4096, 4 * 64 * 4096
    for rewrite in BOTH:
        step, call = captured(model, x, y, (rewrite, "in_place"))
        graph = step.graph
        (last,) = (
            n
            for n in graph.nodes
            if n.overwrites and n.phase == "backward" and n.op.startswith("row_chunks")
        )
        on_storage = {graph.root(last.outputs[0]), *graph.views[graph.root(last.outputs[0])]}
        touching = [n for n in graph.nodes if on_storage.intersection((*n.inputs, *n.outputs))]
        assert len(touching) >= 4
        assert not any(node.recomputable for node in touching)
        simulation = simulate(graph, baseline(graph))
        assert wide < simulation.peak_bytes - graph.resident_bytes < 1.1 * wide + n_chunks * chunk
        expected = results(model, lambda: model(x, y))
        program = BoundProgram(step, build_program(step, baseline(graph)))
        run = lambda: results(model, lambda: program.run(model, call))  # noqa: B023, E731
        assert_equal(run(), expected)
        model.zero_grad()  # what is freed while it is measured would be subtracted
        gc.collect()
        taken_bytes = cpu_peak_bytes(run).peak_bytes
        assert taken_bytes == pytest.approx(simulation.peak_bytes - graph.resident_bytes, abs=1e5)


def test_chunks_of_the_gradient_before_those_of_the_loss_are_refused() -> None:
    """By both simulators."""
    graph = captured(Head(LOSSES["mean"]), *batch(), ("chunked_loss", "in_place"))[0].graph
    forward, backward = (n.name for n in graph.nodes if n.op.startswith("row_chunks("))
    assert graph.node_by_name[backward].overwrites is not None  # the logits, which both read
    ops = list(baseline(graph).ops)
    i, j = (ops.index(Compute(name)) for name in (forward, backward))
    ops[i], ops[j] = ops[j], ops[i]
    assert not assert_simulators_agree(graph, Schedule(tuple(ops), graph.graph_id))
