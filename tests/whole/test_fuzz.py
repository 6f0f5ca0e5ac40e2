"""Random small modules: no plan changes a bit. `python -m benchmarks.fuzz` tries a thousand."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import Tally, try_recipe
from benchmarks.random_modules import OPERATIONS, WIDE_LOSSES, Recipe, Step
from scheduler_runtime.verifying import differences


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Up to seven operations, each of which reads any three earlier values."""
    steps = []
    for index in range(draw(st.integers(2, 7))):
        reads = st.tuples(*[st.integers(0, index)] * 3)
        steps.append(
            Step(draw(st.sampled_from(list(OPERATIONS))), draw(st.integers(0, 1)), draw(reads))
        )
    returned = draw(st.lists(st.integers(0, len(steps)), max_size=2, unique=True))
    return Recipe(tuple(steps), tuple(sorted(returned)), draw(st.sampled_from([(), (1,)])))


@pytest.mark.slow
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(recipe=recipes())
def test_no_plan_of_a_random_module_changes_a_bit(recipe: Recipe) -> None:
    tally = Tally()
    try_recipe(recipe, random.Random(0), tally, search=False)
    assert tally.mismatches == []
    assert tally.refusals == []
    assert tally.n_plans >= 2
    assert tally.n_compared > 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("loss", WIDE_LOSSES)
def test_a_loss_in_row_chunks_has_the_bits_of_the_whole(loss: str) -> None:
    tally, step = Tally(), Step("gelu", 0, (0, 0, 0))
    recipe = Recipe((step, step), (1,), (), n_rows=300, wide_loss=loss, n_classes=16384)
    try_recipe(recipe, random.Random(0), tally, search=False)
    assert tally.mismatches == []
    assert tally.refusals == []
    assert tally.n_chunked > 0


def test_a_bit_that_differs_is_told() -> None:
    one = {"loss": torch.zeros(3), "gradient": torch.ones(2)}
    assert differences(one, {name: tensor.clone() for name, tensor in one.items()}) == {}
    assert list(differences(one, {**one, "loss": -torch.zeros(3)})) == ["loss"]
    assert differences(one, {"loss": one["loss"]}) == {"gradient": "gradient is missing"}
    assert list(differences({}, {"loss": one["loss"]})) == ["loss"]


@pytest.mark.slow
def test_every_operation_can_be_planned() -> None:
    tally = Tally()
    for name in OPERATIONS:
        step = Step(name, 0, (0, 0, 0))
        try_recipe(Recipe((step, step), (1,), ()), random.Random(0), tally, search=False)
    assert tally.refusals == []
    assert tally.mismatches == []
    assert tally.n_models == len(OPERATIONS)
