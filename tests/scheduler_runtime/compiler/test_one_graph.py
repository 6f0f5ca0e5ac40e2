"""Modules of which torch.compile makes no graph, or another one if a call changes what it reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler_runtime import GraphBreakError, compile, compile_reports
from tests.support.bitwise import assert_bitwise_identical


class _Config:
    problem_type: str | None = None
    n_calls = 0


class _Classifier(nn.Module):
    """Its first call completes the configuration, as transformers' classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)
        self.config = _Config()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.problem_type is None:
            self.config.problem_type = "single_label_classification"
        if self.config.problem_type != "single_label_classification":
            return self.head(x).square().mean()
        return nn.functional.cross_entropy(self.head(x), labels)


class _Counts(_Classifier):
    """Every call changes what the next one reads."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.config.n_calls += 1
        return super().forward(x, labels) * self.config.n_calls


class _Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if (x > 0).sum().item() == 1:
            y = y * 2
        return y.sum()


def test_a_branch_on_values_is_told_as_a_graph_break() -> None:
    with pytest.raises(GraphBreakError, match=r"_Branches.*data-dependent"):
        compile(_Branches(4, 4), torch.randn(2, 4), budget="1GB", backend="aot_eager")


def test_what_the_first_call_sets_is_compiled_as_later_calls_read_it() -> None:
    model, batch = _Classifier(), (torch.randn(16, 8), torch.arange(16) % 4)
    compile(model, batch, budget="1GB", backend="aot_eager")
    (report,) = compile_reports(model)
    assert len(report.attempts) == 1
    assert_bitwise_identical(_Classifier(), model, batch)
    assert len(compile_reports(model)) == 1


def test_what_every_call_changes_is_refused() -> None:
    model, batch = _Counts(), (torch.randn(16, 8), torch.arange(16) % 4)
    with pytest.raises(GraphBreakError, match="changes what forward reads"):
        compile(model, batch, budget="1GB", backend="aot_eager")
