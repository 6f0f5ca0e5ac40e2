"""What the loss in row chunks leaves alone: other losses, and logits that are read again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.trace import trace, trace_variants
from tests.graphs.rewrites.test_chunked_loss import BOTH, LOSSES, probabilities, small_chunks
from tests.support.wide_logits import Head, batch, captured, rows

__all__ = ["small_chunks"]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(*rows(x, y), weight=torch.ones(131)),
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
        lambda x, y: F.cross_entropy(x[0], y[0]),
        lambda x, y: F.cross_entropy(rows(x, y)[0], probabilities(y)),
        lambda x, y: F.kl_div(F.log_softmax(rows(x, y)[0], -1), probabilities(y), reduction="sum"),
        lambda x, y: (F.log_softmax(x, -1) * torch.arange(131)).sum(),
        lambda x, y: (F.log_softmax(x, 1).gather(-1, y.clamp(0).unsqueeze(-1))).sum(),
        lambda x, y: (F.log_softmax(x, -1) * probabilities(y).view_as(x)).sum(1).square().sum(),
        lambda x, y: (F.log_softmax(x, -1) * probabilities(y).view_as(x)).sum((0, 2)).norm(),
        lambda x, y: (
            -(F.log_softmax(x, -1) * probabilities(y).view(100, 3, 131).transpose(0, 1))
            .sum(-1)
            .mean()
        ),
        lambda x, y: torch.logsumexp(rows(x, y)[0], 0).mean(),
        lambda x, y: F.log_softmax(rows(x, y)[0], -1)[torch.arange(300).flip(0), y.view(-1)].mean(),
        lambda x, y: F.ctc_loss(
            F.log_softmax(rows(x, y)[0], -1).view(100, 3, 131),
            torch.ones(3, 2, dtype=torch.long),
            torch.full((3,), 100),
            torch.full((3,), 2),
        ),
    ],
    ids=[
        "class weights",
        "images",
        "few rows",
        "probabilities",
        "distillation",
        "weights by hand",
        "over the rows",
        "sums over rows",
        "sums over rows and classes",
        "a transposed teacher",
        "log of sums over rows",
        "rows by index, in another order",
        "alignments",
    ],
)
@pytest.mark.parametrize("rewrite", BOTH)
def test_other_losses_are_left_alone(loss, rewrite) -> None:
    model, (x, y) = Head(loss), batch()
    plain, rewritten = trace(model, (x, y)), trace(model, (x, y), rewrites=(rewrite,))
    assert rewritten.graph_id == plain.graph_id


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("loss", "n_classes"),
    [
        (
            lambda x, y: F.cross_entropy(*rows(x, y.clamp(0).to(torch.uint8)), ignore_index=-100),
            200,
        ),
        (lambda x, y: F.cross_entropy(*rows(x, y * 0)), 1),
        (lambda x, y: F.cross_entropy(*rows(x, y * 0), label_smoothing=0.1), 1),
    ],
    ids=["targets in bytes", "one class", "one class, smoothed"],
)
def test_targets_in_bytes_and_a_single_class_are_left_alone(loss, n_classes) -> None:
    """As bytes, -100 is 156."""
    model, (x, y) = Head(loss, n_classes), batch(n_classes)
    planned = trace_variants(model, (x, y)).planned
    assert [graph.meta.rewrites for graph in planned] == [[], ["in_place"]]


@pytest.mark.parametrize("rewrite", BOTH)
def test_logits_whose_gradient_is_that_of_a_parameter_are_not_overwritten(rewrite) -> None:
    """A parameter's gradient has memory of its own, so what the loss reads may run again."""

    class Prior(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 131, bias=False)
            self.prior = nn.Parameter(torch.zeros(3, 100, 131))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(x) + self.prior
            return LOSSES["mean"](logits, y) / 2

    graph = captured(Prior(), *batch(), (rewrite, "in_place"))[0].graph
    assert any(node.op.startswith("row_chunks") for node in graph.nodes)
    (logits,) = graph.node_by_name["add"].outputs
    assert logits not in {node.overwrites for node in graph.nodes}
