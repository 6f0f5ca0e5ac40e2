"""Forward hooks that are methods of the model's modules are traced with its forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphs.trace import TraceError, trace
from scheduler_runtime import fit
from tests.support.bitwise import assert_equal


class LayerOutput(nn.Module):
    """Reads what a hook keeps of a layer's output, as BYOL and DINO do around any network.

    forgets: whether the output is dropped before forward ends.
    """

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head, self.forgets = nn.Linear(8, 2), forgets
        self.kept: dict[str, torch.Tensor] = {}
        self.net[1].register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        self.kept["layer"] = output.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.net(x)
        layer = self.kept["layer"]
        if self.forgets:
            self.kept.clear()
        return self.head(layer).square().mean()


def test_an_output_kept_within_forward_is_planned() -> None:
    plain, x = LayerOutput(forgets=True), torch.randn(4, 8)
    fitted = fit(copy.deepcopy(plain), budget="5MB")
    for _ in range(2):
        plain.zero_grad()
        fitted.zero_grad()
        losses = [model(x) for model in (plain, fitted)]
        for loss in losses:
            loss.backward()
        one, other = (
            [p.grad for p in m.parameters() if p.grad is not None] for m in (plain, fitted)
        )
        assert_equal([losses[0].detach(), *one], [losses[1].detach(), *other])
    assert fitted.kept == {}


def test_an_output_kept_beyond_forward_is_refused() -> None:
    model = LayerOutput(forgets=False)
    with pytest.raises(TraceError, match="changes the attribute 'kept' of 'LayerOutput'"):
        trace(model, torch.randn(4, 8))
    assert model.kept == {}


def test_other_hooks_are_refused() -> None:
    model = LayerOutput(forgets=True)
    model.net[0].register_forward_pre_hook(lambda _module, args: args)
    model.net[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(TraceError, match=r"submodule 'net\.0' has a forward pre-hook"):
        trace(model, torch.randn(4, 8))
