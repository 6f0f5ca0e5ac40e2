"""`fit` where the training computes the loss: what PyTorch takes is at most what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.costs import cpu_peak_bytes
from scheduler_runtime import fit
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.measuring import bytes_of, emptied
from solver import solve

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CPU = torch.device("cpu")
N_ROWS, WIDTH = 256, 64
ABOVE = 0.001
SHARE = 0.7
WITHOUT_ROOM_BYTES = 560_000


def _shares(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def _likelihood(x: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(x, -1)


LOSSES: dict[str, tuple[Loss, Callable[[torch.Tensor], torch.Tensor], int | None]] = {
    "mse_loss": (F.mse_loss, torch.tanh, None),
    "cross_entropy": (F.cross_entropy, lambda t: t.argmax(1), None),
    "l1_loss": (F.l1_loss, torch.tanh, 4),
    "square by hand": (lambda x, t: ((x - t) ** 2).mean(), torch.tanh, 5),
    "smooth_l1_loss": (F.smooth_l1_loss, torch.tanh, None),
    "huber_loss": (F.huber_loss, torch.tanh, None),
    "bce with logits": (F.binary_cross_entropy_with_logits, torch.sigmoid, None),
    "bce": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), torch.sigmoid, 4),
    "kl_div": (lambda x, t: F.kl_div(_likelihood(x), t, reduction="sum"), _shares, 4),
    "two losses": (lambda x, t: F.mse_loss(x, t) + 0.1 * F.l1_loss(x, t), torch.tanh, 4),
    "labels as shares": (F.cross_entropy, _shares, 3),
}
"""The loss, its target from random numbers, and how many outputs it takes besides the output and
its gradient, target included; None: what is reserved where nothing is said."""


def layers() -> tuple[nn.Module, torch.Tensor]:
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5)]
    return nn.Sequential(*(m for pair in pairs for m in pair)), torch.randn(N_ROWS, WIDTH)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    widths = [4, 16, 16, 16, 2]
    pairs = [(nn.Conv2d(a, b, 3, padding=1), nn.GELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*(m for pair in pairs for m in pair)), torch.randn(8, 4, 32, 32)


NETS = {"layers": layers, "convolutions": convolutions}


class Loop:
    """A training as people write it.

    holds: what it keeps of a step until the next one's takes its place: "output", "loss", both or
        nothing.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: tuple[torch.Tensor, ...], holds: str):
        self.model, self.loss, self.batch, self.holds = model, loss, batch, holds
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.held: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        x, target = self.batch
        self.optimizer.zero_grad()
        output = self.model(x)
        if "output" in self.holds:
            self.held["output"] = output
        loss = self.loss(output, target)
        del output
        if "loss" in self.holds:
            self.held["loss"] = loss
        loss.backward()
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """Of two steps in turn, after the first one."""
        self.step()
        self.held.clear()
        self.optimizer.zero_grad()
        emptied(CPU)
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        there = [*self.model.parameters(), *self.batch, *states]
        return bytes_of(there, CPU) + cpu_peak_bytes(lambda: (self.step(), self.step())).peak_bytes


def _check(net: str, name: str, *, holds: str) -> None:
    torch.manual_seed(0)
    model, x = NETS[net]()
    loss, made, n_outputs = LOSSES[name]
    output = model(x).detach()
    target = made(torch.randn_like(output))
    loop = Loop(model, loss, (x, target), holds)
    plain = solve(
        model,
        (x, target),
        budget="1GB",
        loss=lambda output, batch: loss(output, batch[1]),
        inputs=lambda batch: batch[0],
        optimizer=loop.optimizer,
    )
    resident = plain.graph.resident_bytes
    budget = int(resident + SHARE * (plain.baseline.peak_bytes - resident))
    fit(
        model,
        budget=budget,
        optimizer=loop.optimizer,
        loss_reserve=None if n_outputs is None else n_outputs * output.nbytes,
    )
    measured = loop.peak_bytes()
    solution = plans_of(model)[-1].solution
    assert solution.simulation is not None
    assert measured <= (1 + ABOVE) * solution.simulation.peak_bytes
    assert solution.simulation.peak_bytes <= budget


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", LOSSES)
def test_what_the_step_takes_is_within_the_prediction(name: str, net: str) -> None:
    _check(net, name, holds="")


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("mse_loss", "output"),
        ("mse_loss", "loss"),
        ("mse_loss", "output and loss"),
        ("cross_entropy", "output and loss"),
        ("huber_loss", "output and loss"),
        ("l1_loss", "output and loss"),
    ],
)
def test_what_the_loop_keeps_of_the_step_before_is_counted(name: str, holds: str) -> None:
    _check("layers", name, holds=holds)


@pytest.mark.slow
def test_a_budget_without_room_for_what_a_loss_may_keep_is_kept_to_with_a_warning() -> None:
    torch.manual_seed(0)
    model, x = layers()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.warns(UserWarning, match="only for a loss that keeps nothing"):
        fit(model, budget=WITHOUT_ROOM_BYTES, optimizer=sgd)(x)
    (plan,) = plans_of(model)
    assert plan.solution.simulation is not None
    assert plan.solution.simulation.peak_bytes <= WITHOUT_ROOM_BYTES
