"""`fit` where the training computes the loss: what PyTorch takes is at most what was predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from graphs.costs import cpu_peak_bytes
from scheduler_runtime import fit
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.measuring import bytes_of, free_unreferenced
from solver import solve
from tests.support.bitwise import assert_equal

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CPU = torch.device("cpu")
N_ROWS, WIDTH = 256, 64
ABOVE = 0.001
SHARE = 0.7
WITHOUT_ROOM_BYTES = 560_000
SMALL_BUDGET_BYTES = 1_000_000
LARGE_BUDGET_BYTES = 1_700_000


def _shares(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def _likelihood(x: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(x, -1)


LOSSES: dict[str, tuple[Loss, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mse_loss": (F.mse_loss, torch.tanh),
    "cross_entropy": (F.cross_entropy, lambda t: t.argmax(1)),
    "l1_loss": (F.l1_loss, torch.tanh),
    "square by hand": (lambda x, t: ((x - t) ** 2).mean(), torch.tanh),
    "smooth_l1_loss": (F.smooth_l1_loss, torch.tanh),
    "huber_loss": (F.huber_loss, torch.tanh),
    "bce with logits": (F.binary_cross_entropy_with_logits, torch.sigmoid),
    "bce": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), torch.sigmoid),
    "kl_div": (lambda x, t: F.kl_div(_likelihood(x), t, reduction="sum"), _shares),
    "two losses": (lambda x, t: F.mse_loss(x, t) + 0.1 * F.l1_loss(x, t), torch.tanh),
    "labels as shares": (F.cross_entropy, _shares),
}
"""The loss, and its target from random numbers."""


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

    def first_peak_bytes(self) -> int:
        """Of the first step, in which the optimizer makes its state."""
        there = [*self.model.parameters(), *self.batch]
        return bytes_of(there, CPU) + cpu_peak_bytes(self.step).peak_bytes

    def peak_bytes(self) -> int:
        """Of two steps in turn, after the first one."""
        self.held.clear()
        self.optimizer.zero_grad()
        free_unreferenced(CPU)
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        there = [*self.model.parameters(), *self.batch, *states]
        return bytes_of(there, CPU) + cpu_peak_bytes(lambda: (self.step(), self.step())).peak_bytes


def _check(net: str, name: str, *, holds: str) -> None:
    torch.manual_seed(0)
    model, x = NETS[net]()
    loss, made = LOSSES[name]
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
    fit(model, budget=budget, optimizer=loop.optimizer)
    measured = [loop.first_peak_bytes(), loop.peak_bytes()]
    (plan,) = plans_of(model)
    planned = plan.solution.simulation.peak_bytes
    assert measured[0] <= (1 + ABOVE) * budget
    assert measured[1] <= (1 + ABOVE) * planned
    assert planned <= budget


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", LOSSES)
def test_what_the_step_takes_is_within_the_prediction(name: str, net: str) -> None:
    _check(net, name, holds="")


@pytest.mark.slow
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
    assert plan.solution.simulation.peak_bytes <= WITHOUT_ROOM_BYTES


def _many(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x - k * t).abs() for k in range(6)]).mean()


def fitted_loop(loss: Loss, budget: int | str, holds: str = "") -> Loop:
    torch.manual_seed(0)
    model, x = layers()
    loop = Loop(model, loss, (x, torch.randn(N_ROWS, WIDTH)), holds)
    fit(model, budget=budget, optimizer=loop.optimizer)
    return loop


@pytest.mark.slow
def test_a_loss_above_what_is_reserved_is_said_and_planned_for() -> None:
    loop = fitted_loop(_many, LARGE_BUDGET_BYTES)
    words = r"the loss takes .* were reserved: this step takes .*, \d.* more than the .* available"
    with pytest.warns(UserWarning, match=words):
        first_bytes = loop.first_peak_bytes()
    assert first_bytes > LARGE_BUDGET_BYTES
    assert loop.peak_bytes() <= LARGE_BUDGET_BYTES
    (plan,) = plans_of(loop.model)
    assert plan.solution.simulation.n_recomputed > 0


@pytest.mark.slow
def test_a_plan_for_a_loss_that_takes_less_becomes_faster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loop = fitted_loop(F.cross_entropy, SMALL_BUDGET_BYTES)
    loop.batch = loop.batch[0], loop.batch[1].argmax(1)
    overheads = []
    for _ in range(3):
        loop.step()
        (plan,) = plans_of(loop.model)
        overheads.append(plan.solution.overhead)
    assert overheads[0] > overheads[1] == overheads[2]
    assert caplog.text.count("planned again, since the loss takes") == 1


@pytest.mark.slow
def test_losses_and_weights_are_those_of_eager_mode_while_the_loss_is_watched() -> None:
    assert_equal(_steps(F.mse_loss, SMALL_BUDGET_BYTES), _steps(F.mse_loss, None))


@pytest.mark.slow
def test_another_shape_is_planned_where_a_loss_that_was_seen_does_not_fit() -> None:
    loop = fitted_loop(_many, SMALL_BUDGET_BYTES)
    for match in ("this step takes up to", "The earlier plan stays in use"):
        with pytest.warns(UserWarning, match=match):
            loop.step()
    loop.batch = tuple(each[: N_ROWS - 8] for each in loop.batch)
    with pytest.warns(UserWarning, match="were reserved: this step takes"):
        loop.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fit. (the loss takes|no schedule)")  # of the other model
def test_two_models_in_one_step_are_both_watched() -> None:
    loops = [fitted_loop(F.cross_entropy, SMALL_BUDGET_BYTES) for _ in range(2)]
    (one, first), (other, second) = [(loop.model, loop.optimizer) for loop in loops]
    x, target = loops[0].batch[0], loops[0].batch[1].argmax(1)
    for _ in range(2):
        loss = F.cross_entropy(one(x), target) + F.cross_entropy(other(x), target)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert not _get_current_dispatch_mode_stack()
    for model in (one, other):
        (plan,) = plans_of(model)
        assert "196.6 KB" not in plan.notes[0]


def _of_sparse_rows(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(torch.eye(N_ROWS).to_sparse_csr() @ x, target)


def _through_mkldnn(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, target) * x.detach().to_mkldnn().to_dense().abs().max()


def _steps(loss: Loss, budget: int | None) -> list[torch.Tensor]:
    """The weights after three steps (None: in eager mode), and the last loss."""
    torch.manual_seed(0)
    model, x = layers()
    loop = Loop(model, loss, (x, torch.randn(N_ROWS, WIDTH)), "loss")
    if budget is not None:
        fit(model, budget=budget, optimizer=loop.optimizer)
    for _ in range(3):
        loop.step()
    return [*model.parameters(), loop.held["loss"]]


@pytest.mark.slow(sample=1)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("loss", [_of_sparse_rows, _through_mkldnn])
def test_a_loss_that_cannot_be_counted_runs_as_in_eager_mode(loss: Loss) -> None:
    assert_equal(_steps(loss, SMALL_BUDGET_BYTES), _steps(loss, None))


def _compiled(compiled_graphs: list[fx.GraphModule], loss: Loss) -> Any:
    """By a backend that leaves nothing to be seen, as Inductor's kernels do."""

    def unseen(graph: fx.GraphModule, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                return graph.forward(*args)

        return make_boxed_func(run)

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled_graphs.append(graph)
        return aot_autograd(fw_compiler=unseen)(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(loss, backend=backend)


def test_a_compiled_loss_stays_compiled_and_nothing_is_concluded_from_it() -> None:
    graphs: list[fx.GraphModule] = []
    loop = fitted_loop(_compiled(graphs, F.mse_loss), SMALL_BUDGET_BYTES)
    notes = []
    for _ in range(3):
        loop.step()
        (plan,) = plans_of(loop.model)
        notes.append(plan.notes[0])
    assert len(graphs) == 1
    assert len({*notes}) == 1


class Rotation(nn.Module):
    """Returns complex numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.mH


def test_a_model_may_return_complex_numbers() -> None:
    torch.manual_seed(0)
    batch = torch.randn(N_ROWS, WIDTH, dtype=torch.cfloat)
    plain = Rotation()
    fitted = copy.deepcopy(plain)
    fit(fitted, budget="100MB", optimizer=torch.optim.SGD(fitted.parameters(), lr=0.1))
    for model in (plain, fitted):
        for part in (torch.real, torch.abs):
            part(model(batch)).square().mean().backward()
    assert_equal([fitted.weight.grad], [plain.weight.grad])
