"""Random operators: a planned step draws eager's numbers into eager's places, or refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from solver.schedule.recompute import keep
from solver.schedule.simulator import simulate
from tests.support.bitwise import assert_equal, one_step, solution_of

N_ROWS, N_COLUMNS = 40, 24
Draw = Callable[[torch.Tensor], torch.Tensor]

STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.ones(N_ROWS, N_COLUMNS),
    "transposed": lambda: torch.ones(N_COLUMNS, N_ROWS).t(),
    "every other row": lambda: torch.ones(2 * N_ROWS, N_COLUMNS)[::2],
    "every other column": lambda: torch.ones(N_ROWS, 2 * N_COLUMNS)[:, ::2],
    "part of the rows": lambda: torch.ones(N_ROWS + 3, N_COLUMNS)[2:-1],
}

FILLS: dict[str, Draw] = {
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ by tensor": lambda t: t.bernoulli_(torch.full((N_COLUMNS, N_ROWS), 0.4).t()),
    "bernoulli_ of bfloat16": lambda t: t.bfloat16().bernoulli_(0.3).float(),
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "normal_ of a part": lambda t: (t[:, 3:7].normal_(), t)[1],
    "uniform_": lambda t: t.uniform_(-1.0, 1.0),
    "random_": lambda t: t.random_(3, 9),
    "random_ below": lambda t: t.random_(9),
    "exponential_": lambda t: t.exponential_(),
    "log_normal_": lambda t: t.log_normal_(),
    "dropout_": lambda t: F.dropout(t + 1, 0.3, inplace=True),
    "alpha_dropout": lambda t: F.alpha_dropout(t + 1, 0.3, training=True),
    "rrelu": lambda t: F.rrelu(t - 2, training=True),
    "rand_like": lambda t: torch.rand_like(t),
    "rand on a device": lambda t: torch.rand(t.shape, device=t.device),
    "randint on a device": lambda t: torch.randint(3, 9, t.shape, device=t.device).to(t.dtype),
}


class Noisy(nn.Module):
    """A linear map times what is drawn."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(N_COLUMNS, N_COLUMNS)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.draw()).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(N_ROWS, N_COLUMNS)


@pytest.mark.slow(sample=1, keep=10)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("fill", FILLS)
def test_a_fill_puts_eagers_numbers_in_eagers_places(fill: str, strides: str) -> None:
    torch.manual_seed(0)
    model, batch = Noisy(lambda: FILLS[fill](STRIDES[strides]())), Noisy.batch()
    graph = trace(model, batch)
    schedule = keep(graph, set())
    assert simulate(graph, schedule).n_recomputed > 0
    planned = apply(copy.deepcopy(model), solution_of(graph, schedule))
    assert_equal(one_step(model, batch, 1), one_step(planned, batch, 1))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(N_ROWS, N_COLUMNS, generator=torch.Generator()),
        lambda: torch.poisson(torch.ones(N_ROWS, N_COLUMNS), torch.Generator()),
        lambda: torch.ones(N_ROWS, N_COLUMNS).uniform_(generator=torch.Generator()),
        lambda: torch.ones(N_ROWS, N_COLUMNS).normal_(generator=torch.Generator()),
        lambda: torch.ones(N_COLUMNS, N_ROWS).t().bernoulli_(generator=torch.Generator()),
        lambda: torch.ones(N_ROWS, N_COLUMNS).random_(1, 5, generator=torch.Generator()),
        lambda: torch.ones(N_ROWS, N_COLUMNS).exponential_(generator=torch.Generator()),
    ],
)
def test_a_generator_of_its_own_is_refused_by_name(draw: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(TraceError, match=r"aten\.\w+\.\w+ draws from a generator of its own"):
        trace(Noisy(draw), Noisy.batch())


def _seeds() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.rand(N_ROWS, N_COLUMNS)


def _forks() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(N_ROWS, N_COLUMNS)


def _puts_back() -> torch.Tensor:
    state = torch.get_rng_state()
    drawn = torch.rand(N_ROWS, N_COLUMNS)
    torch.set_rng_state(state)
    return drawn


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("draw", [_seeds, _forks, _puts_back])
def test_setting_the_random_state_in_forward_is_refused(draw: Callable[[], torch.Tensor]) -> None:
    model, batch = Noisy(draw), Noisy.batch()
    functions = torch.manual_seed, torch.set_rng_state, torch.random.set_rng_state
    state = torch.get_rng_state()
    with pytest.raises(TraceError, match="forward sets the random state"):
        trace(model, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert functions == (torch.manual_seed, torch.set_rng_state, torch.random.set_rng_state)


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.tensor(random.random()), "Python's random"),
        (lambda: torch.tensor(float(numpy.random.rand())), r"numpy\.random"),
    ],
)
def test_numbers_that_are_not_torchs_are_refused(
    draw: Callable[[], torch.Tensor], name: str, with_loss: bool
) -> None:
    """They would be the same at every step; the states are as they were."""
    states = random.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]
    loss = (lambda output, _: 2 * output) if with_loss else None
    with pytest.raises(TraceError, match=f"forward draws numbers with {name}"):
        trace(Noisy(draw), Noisy.batch(), loss=loss)
    after = random.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]
    assert after == states


class OwnGenerator(nn.Module):
    """Draws from a generator that it holds."""

    def __init__(self, generator: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.held = {"of the mask": generator}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * float(self.held["of the mask"].random())


SHARED = random.Random(0)


class SharedGenerator(OwnGenerator):
    """Draws from one that is a global of its file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * SHARED.random()


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize(
    ("model", "generator", "name"),
    [
        (OwnGenerator(each := random.Random(0)), each, r"random\.Random in 'held'"),
        (OwnGenerator(own := numpy.random.default_rng(0)), own, r"numpy\.Generator in 'held'"),
        (OwnGenerator(old := numpy.random.RandomState(0)), old, r"numpy\.RandomState in 'held'"),
        (SharedGenerator(None), SHARED, r"random\.Random in 'SHARED'"),
    ],
)
def test_a_generator_of_its_own_is_refused(model: nn.Module, generator: Any, name: str) -> None:
    expected = copy.deepcopy(generator).random()
    with pytest.raises(TraceError, match=f"forward draws numbers with the {name}"):
        trace(model, torch.randn(2, 4))
    assert generator.random() == expected


def test_sizes_do_not_depend_on_what_was_traced_before() -> None:
    """PyTorch remembers the results of fake operators, but not the gaps before them."""
    model = Noisy(lambda: FILLS["normal_ of a part"](STRIDES["part of the rows"]()))
    FakeTensorMode.cache_clear()
    first = trace(model, model.batch())
    assert trace(model, model.batch()).graph_id == first.graph_id
