"""Models of transformers that return hidden states register hooks in their first call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.same_bits import keeping_nothing
from graphs.trace import trace
from scheduler_runtime import apply
from tests.support.bitwise import assert_equal


class Distilled(nn.Module):
    """The loss reads every hidden state, as when a small model learns from a large one."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=64,
        )
        self.inner = BertForSequenceClassification(config)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels, output_hidden_states=True)
        extra = torch.stack([hidden.square().mean() for hidden in out.hidden_states]).sum()
        return {"loss": out.loss + extra, "hidden": out.hidden_states}


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * 16).reshape(2, 16) % 64, "labels": torch.tensor([0, 1])}


def one_step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    out = model(**batch())
    out["loss"].backward()
    return [
        out["loss"],
        *out["hidden"],
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


def n_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("called_before", [False, True])
def test_hidden_states_and_gradients_are_the_same_bits(called_before: bool) -> None:
    torch.manual_seed(0)
    model = Distilled()
    if called_before:
        model(**batch())
    n_before = n_hooks(model)
    assert bool(n_before) == called_before
    solution = keeping_nothing(trace(model, batch()))
    assert n_hooks(model) == n_before
    plain = copy.deepcopy(model)
    apply(model, solution)
    assert_equal(one_step(plain), one_step(model))
    model.eval()
    assert len(model(**batch())["hidden"]) == 3  # collected once, not twice


def test_a_submodule_with_other_hooks_is_one_piece() -> None:
    model = Distilled()
    layer = model.inner.bert.encoder.layer[0]
    layer.output.register_forward_hook(lambda *_: None)
    parts = trace(model, batch()).meta.environment["opaque"]
    assert [part["module"] for part in parts] == ["inner.bert.encoder.layer.0.output"]
