"""The reason for one more plan names the buffer whose value forward reads."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from scheduler_runtime import fit
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.planned.forward import N_WORTH_A_WARNING

N_ROWS, N_PLACES = 2, 64


class Queue(nn.Module):
    """Writes each batch into the next rows of a buffer."""

    queue: torch.Tensor
    position: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(N_PLACES, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        at = int(self.position)
        loss = (y @ self.queue.clone().T).square().mean() + y.square().mean()
        with torch.no_grad():
            self.queue[at : at + N_ROWS] = y
            self.position[0] = (at + N_ROWS) % N_PLACES
        return loss


def test_a_buffer_that_forward_reads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Queue()
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(N_WORTH_A_WARNING[0]):
        model(torch.randn(N_ROWS, 4)).backward()
        model.zero_grad()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    plans = [text for text in told if "Plan " in text]
    assert len(plans) == N_WORTH_A_WARNING[0] - 1
    assert all("buffer 'position' has other values than when planned" in text for text in plans)
    assert not any("attributes or settings" in text for text in told)
    (many,) = [text for text in told if "kinds of call" in text]
    assert "forward reads values of buffer 'position'" in many
    assert "pass the value as a tensor" not in many


class FirstOrLater(nn.Module):
    """Asks a counter twice: the answers are the same two in the next step, in another order."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.count == 0:
            y = 2 * y
        if self.count > 0:
            y = 3 * y
        self.count += 1
        return y.square().mean()


def test_the_same_values_in_another_order_are_another_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain, x = FirstOrLater(), FirstOrLater(), torch.randn(2, 4)
    plain.load_state_dict(model.state_dict())
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    told = "buffer 'count' has other values than when planned: forward reads False at another place"
    assert sum(told in record.getMessage() for record in caplog.records) == 1


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_wrapping_the_call_by_a_compiler_is_none() -> None:
    """torch.compile and compile() set attributes of the model that its plan does not depend on."""
    model, x = Scale(), torch.randn(N_ROWS, 4)
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model(x).backward()
    for compiled in (torch.compile(model, backend="eager"), model):
        if compiled is model:
            model.compile(backend="eager")
        model.zero_grad()
        model._compile_kwargs = {}  # type: ignore[assignment]  # as Lightning's torch.compile does
        compiled(x).backward()
    assert len(plans_of(model)) == 1
