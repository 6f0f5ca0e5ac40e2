"""Modules that fail alike become pieces at once, so that tracing does not take a trace for each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.capture.opaque import search
from graphs.capture.opaque.alike import paths_failing_alike
from graphs.model_calls import Call
from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from solver.solving import solve
from tests.support.bitwise import assert_equal

WIDTH = 4
N_LSTMS = search.MOST_TRACES + 1
CPU = torch.device("cpu")
N_TRACES: list[int] = []
"""Beside the first one."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace with pieces enters their stand-ins once."""
    stand_ins = search.replaced_by_stand_ins

    @contextlib.contextmanager
    def counting(*args: Any) -> Iterator[Any]:
        N_TRACES.append(len(N_TRACES))
        with stand_ins(*args) as standing:
            yield standing

    monkeypatch.setattr(search, "replaced_by_stand_ins", counting)
    N_TRACES.clear()


class Recurrent(nn.Module):
    """Layers of an LSTM and a linear map; one LSTM more is not called."""

    def __init__(self, layers: int, make: Callable[[], nn.LSTM]) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(make() for _ in range(layers))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.spare = make()

    def forward(self, x: Tensor) -> Tensor:
        for lstm, linear in zip(self.lstms, self.maps, strict=True):
            x = x + torch.tanh(linear(lstm(x)[0]))
        return x.square().mean()


def lstm(**options: Any) -> nn.LSTM:
    return nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, WIDTH)


def pieces(model: nn.Module) -> list[str]:
    return [part["module"] for part in trace(model, batch()).meta.opaque_parts]


def trained(model: nn.Module) -> list[Tensor | None]:
    """Losses and parameters of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor | None] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.slow
def test_many_lstms_are_pieces_after_one_more_trace() -> None:
    torch.manual_seed(0)
    plain = Recurrent(N_LSTMS, lstm)
    model = copy.deepcopy(plain)
    free = solve(model, batch(), budget="1GB")
    assert len(N_TRACES) <= 2  # the second one where gradients lie otherwise than measured
    found = [part["module"] for part in free.graph.meta.opaque_parts]
    assert found == [f"lstms.{i}" for i in range(N_LSTMS)]
    budget = (free.baseline.peak_bytes + free.graph.resident_bytes) // 2
    apply(model, solve(free.graph, budget=budget))
    assert_equal(trained(plain), trained(model))


def test_an_lstm_that_can_be_traced_is_no_piece() -> None:
    model = Recurrent(2, lstm)
    model.lstms[1] = lstm(proj_size=WIDTH - 1)
    model.maps[1] = nn.Linear(WIDTH - 1, WIDTH)
    assert pieces(model) == ["lstms.0"]


class Rows(nn.Module):
    """Layers of two linear maps; in those that `fails` names the first one branches on a number."""

    def __init__(self, n_layers: int, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(n_layers)
        )
        for i, layer in enumerate(self.layers):
            if fails(i):
                layer[0].forward = partial(_branching, layer[0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _branching(linear: nn.Linear, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, linear.weight, linear.bias)
    return 2 * y if y.sum().item() > 1e9 else y


def test_one_module_of_pytorch_does_not_make_pieces_of_others() -> None:
    assert pieces(Rows(3, lambda i: i == 1)) == ["layers.1.0"]


@pytest.mark.slow
def test_modules_of_pytorch_at_one_place_of_the_layers_are_pieces_once_two_have_failed() -> None:
    n_layers = search.MOST_TRACES + 1
    assert pieces(Rows(n_layers, lambda _: True)) == [f"layers.{i}.0" for i in range(n_layers)]
    assert len(N_TRACES) <= 4


def test_which_modules_are_alike() -> None:
    model = Rows(3, lambda _: False)
    call = Call.of((batch(),), {})
    found = partial(paths_failing_alike, model, call, CPU)
    assert found("layers.1.0", []) == ["layers.1.0"]
    assert found("layers.1.0", ["layers.1.2"]) == ["layers.1.0", "layers.1.2"]
    assert found("layers.1.0", ["layers.0.1"]) == ["layers.1.0"]  # of another class
    assert found("layers.1.0", ["layers.0.0"]) == [f"layers.{i}.0" for i in range(3)]
    model.layers[2][0].requires_grad_(requires_grad=False)
    assert found("layers.1.0", ["layers.0.0"]) == ["layers.0.0", "layers.1.0"]


@pytest.mark.slow
def test_where_too_many_places_fail_the_limit_and_the_cause_are_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "MOST_TRACES", 2)
    monkeypatch.setattr(
        search, "paths_failing_alike", lambda _model, _call, _device, path, _before: [path]
    )
    with pytest.raises(TraceError, match="LSTM runs as one opaque operator") as refused:
        trace(Recurrent(3, lstm), batch())
    assert refused.value.__notes__ == [
        "given up after 2 more traces, each of which failed elsewhere"
    ]
