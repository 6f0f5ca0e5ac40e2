"""Recurrent layers on the CPU are bitwise identical to eager mode for every gate width."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from benchmarks.same_bits import keeping_nothing
from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from tests.support.bitwise import assert_equal, one_step


class Squared(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, state = self.layer(x)
        return output.square().sum() + state.sum()


class Loop(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = None
        for step in x:
            state = self.cell(step, state)
        return state if isinstance(state, tuple) else (state, state)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "GRU": lambda n: nn.GRU(n, n),
    "GRU, two layers both ways": lambda n: nn.GRU(n, n, 2, bidirectional=True, dropout=0.2),
    "GRU, batch first, no bias": lambda n: nn.GRU(n, n, batch_first=True, bias=False),
    "RNN, two layers both ways": lambda n: nn.RNN(n, n, 2, bidirectional=True, dropout=0.2),
    "RNN, relu": lambda n: nn.RNN(n, n, nonlinearity="relu"),
    "GRUCell": lambda n: Loop(nn.GRUCell(n, n)),
    "GRUCell, no bias": lambda n: Loop(nn.GRUCell(n, n, bias=False)),
    "LSTMCell": lambda n: Loop(nn.LSTMCell(n, n)),
    "RNNCell": lambda n: Loop(nn.RNNCell(n, n)),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("width", [16, 50])  # 32 numbers are two registers
@pytest.mark.parametrize("name", LAYERS)
def test_same_bits(name: str, width: int) -> None:
    torch.manual_seed(0)
    plain = Squared(LAYERS[name](width)).train()
    model, x = copy.deepcopy(plain), torch.randn(5, 8, width)
    apply(model, keeping_nothing(trace(model, x)))
    assert_equal(one_step(plain, (x,), 3), one_step(model, (x,), 3))


def test_a_packed_sequence_is_refused_with_the_remedy() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 8)

        def forward(self, x: PackedSequence) -> torch.Tensor:
            return self.layer(x)[0].data.sum()

    packed = pack_padded_sequence(torch.randn(5, 2, 8), torch.tensor([5, 3]))
    with pytest.raises(TraceError, match="pass the padded batch"):
        trace(Packed(), {"x": packed})
