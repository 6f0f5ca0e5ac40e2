"""Random generators other than torch's default ones are found where a forward pass reaches them."""

from __future__ import annotations

import copy
import functools
import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.same_bits import keeping_nothing
from graphs.capture.refuse import generators_of
from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from tests.support.bitwise import assert_equal

NUMPYS = np.random.default_rng(0)


def drawn() -> float:
    return float(NUMPYS.random())


def through_another() -> float:
    return next(drawn() for _ in range(1))


def logged(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> float:
        return function(*args)

    return wrapper


wrapped = logged(drawn)


class Scaling(nn.Module):
    """Scales by a number. None of them draws in forward itself."""

    def draw(self) -> float:
        return drawn()

    @property
    def drawn_property(self) -> float:
        return drawn()

    @staticmethod
    def drawn_alone() -> float:
        return drawn()


class ByFunction(Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * through_another()


class ByDecorated(Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * wrapped()


class ByMethod(Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draw()


class ByProperty(Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.drawn_property


class ByStaticMethod(Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.drawn_alone()


class ByAttribute(Scaling):
    def __init__(self) -> None:
        super().__init__()
        self.number = functools.partial(through_another)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number()


class ByObject(Scaling):
    class Sampler:
        def sample(self) -> float:
            return drawn()

    def __init__(self) -> None:
        super().__init__()
        self.sampler = self.Sampler()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sampler.sample()


KINDS = (
    *(ByFunction, ByDecorated, ByMethod, ByProperty, ByStaticMethod),
    *(ByAttribute, ByObject),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_behind_calls_is_found(kind: type[Scaling]) -> None:
    assert NUMPYS in generators_of(nn.Sequential(kind())).values()


def test_all_generators_in_a_list_are_found() -> None:
    model = nn.Linear(2, 2)
    model.generators = [random.Random(0), random.Random(1), np.random.default_rng(0)]
    found = generators_of(model)
    assert {*map(id, model.generators)} <= {*map(id, found.values())}
    assert "the random.Random in 'generators' (number 2)" in found


def test_of_a_module_without_draws_only_the_global_ones_are_found() -> None:
    found = generators_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout())).values()
    assert all(each is not NUMPYS for each in found)
    assert any(isinstance(each, random.Random) for each in found)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("kind", [ByFunction, ByObject])
def test_planned_steps_draw_what_plain_training_draws(kind: type[Scaling]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), kind(), nn.Linear(32, 8))
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    batch = torch.randn(16, 8)
    fitted(batch).sum().backward()
    seen = []
    for model in (plain, fitted):
        NUMPYS.bit_generator.state = np.random.default_rng(1).bit_generator.state
        for _ in range(2):
            model.zero_grad()
            model(batch).sum().backward()
            seen.append([p.grad.clone() for p in model.parameters()])
    assert_equal(seen[0] + seen[1], seen[2] + seen[3])
    assert not torch.equal(seen[0][0], seen[1][0])


FILLS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "normal": lambda x, own: torch.empty_like(x).normal_(generator=own),
    "exponential": lambda x, own: torch.empty_like(x).exponential_(generator=own),
    "a number": lambda x, own: x * float(torch.rand((), generator=own)),
}


class WithTorchs(nn.Module):
    """Draws from a `torch.Generator` of its own, for which it is planned as one piece."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.fill = FILLS[fill]
        self.own = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.fill(x, self.own))

    def __deepcopy__(self, _memo: object) -> WithTorchs:
        copied = WithTorchs(next(name for name, fill in FILLS.items() if fill is self.fill))
        copied.load_state_dict(self.state_dict())
        return copied


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_piece_draws_from_its_own_generator_as_in_plain_training(
    fill: str, is_recomputed: bool
) -> None:
    """Measuring it and recomputing it leave the generator where one run leaves it."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), WithTorchs(fill), nn.ReLU(), nn.Linear(32, 8)
    )
    planned, batch, seen = copy.deepcopy(plain), torch.randn(64, 8), []
    if is_recomputed:
        step = trace(planned, batch, loss=lambda out, _: out.square().sum())
        apply(planned, keeping_nothing(step))
    else:
        fit(planned, budget="1MB", optimizer=[])
    for model in (plain, planned):
        for _ in range(3):
            model.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            seen.append([loss, *(p.grad for p in model.parameters())])
    for expected, got in zip(seen[:3], seen[3:], strict=True):
        assert_equal(expected, got)


def test_torchs_default_generator_in_an_attribute_is_none_of_them() -> None:
    model = nn.Linear(2, 2)
    model.generator = torch.default_generator
    assert all(each is not torch.default_generator for each in generators_of(model).values())


class MakesItsGenerator(nn.Module):
    """Makes the generator that it draws from in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.linear = None, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own is None:
            self.own = torch.Generator().manual_seed(3)
        return self.linear(x + torch.rand(x.shape, generator=self.own))


def test_a_piece_whose_first_call_makes_a_generator_is_refused() -> None:
    """It is planned after a call, as the error advises."""
    model = nn.Sequential(nn.Linear(8, 32), MakesItsGenerator(), nn.Linear(32, 8))
    batch, loss = torch.randn(64, 8), lambda out, _: out.square().sum()
    with pytest.raises(TraceError) as caught:
        trace(model, batch, loss=loss)
    assert any("makes the torch.Generator in" in note for note in caught.value.__notes__)
    assert model[1].own is None
    model(batch)
    assert trace(model, batch, loss=loss).meta.opaque_parts


class DrawsAnew(nn.Module):
    """Draws from a generator of each call."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed, self.linear = seed, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = np.random.default_rng(self.seed).random() if x.sum().item() < 1e9 else 1.0
        return self.linear(x) * scale


@pytest.mark.parametrize("seed", [None, 0])
def test_a_piece_that_gives_other_results_when_run_again_is_not_recomputed(
    seed: int | None,
) -> None:
    model = nn.Sequential(nn.Linear(8, 32), DrawsAnew(seed), nn.Linear(32, 8))
    graph = trace(model, torch.randn(64, 8), loss=lambda out, _: out.square().sum())
    assert graph.meta.opaque_parts[0]["recomputable"] == (seed is not None)


class Unseeded(nn.Module):
    """Makes a generator without a seed in each call, and multiplies by a number from it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.default_rng().random(),
        lambda: np.random.RandomState().rand(),
        lambda: random.SystemRandom().random(),
        lambda: secrets.randbelow(1) / 5,  # the same number each time, as others may be by chance
    ],
    ids=["default_rng", "RandomState", "SystemRandom", "secrets"],
)
def test_numbers_from_the_operating_system_do_not_become_constants(
    draw: Callable[[], float],
) -> None:
    loss = {"loss": lambda out, _: out.square().sum()}
    with pytest.raises(TraceError, match=r"that the operating system has seeded, in Unseeded; a"):
        trace(Unseeded(draw), torch.randn(64, 32), **loss)
    model = nn.Sequential(nn.Linear(8, 32), Unseeded(draw), nn.Linear(32, 8))
    graph = trace(model, torch.randn(64, 8), **loss)
    (part,) = graph.meta.opaque_parts
    assert not part["recomputable"]
