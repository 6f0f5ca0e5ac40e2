"""The best division of layers into stages, against all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from solver.plan_analysis.divisions import Part, StageTime, best_division, equal_parts


def all_divisions(n_layers: int, n_stages: int) -> list[tuple[Part, ...]]:
    found = []
    for cuts in itertools.combinations(range(1, n_layers), n_stages - 1):
        ends = (0, *cuts, n_layers)
        found.append(tuple(Part(i, *pair) for i, pair in enumerate(itertools.pairwise(ends))))
    return found


def cost(parts: tuple[Part, ...], times: dict[Part, float]) -> tuple[float, float]:
    each = [times[part] for part in parts]
    return max(each), sum(each)


@pytest.mark.slow(sample=100)
@pytest.mark.parametrize("seed", range(300))
def test_the_best_division_is_that_of_all(seed: int) -> None:
    draw = random.Random(seed)
    n_stages = draw.randint(1, 4)
    n_layers = draw.randint(n_stages, 8)
    divisions = all_divisions(n_layers, n_stages)
    parts = {part for division in divisions for part in division}
    layer_s = [draw.randint(1, 9) for _ in range(n_layers)]
    bounds: dict[Part, float] = {}
    plans: dict[Part, StageTime] = {}
    for part in sorted(parts):
        least_s = sum(layer_s[part.first : part.end])
        bounds[part] = math.inf if draw.random() < 0.05 else least_s
        proven_s = math.inf if draw.random() < 0.15 else least_s + draw.randint(0, 5)
        plan_s = math.inf if draw.random() < 0.1 else proven_s + draw.choice((0, 0, 2))
        plans[part] = StageTime(plan_s, proven_s)
    asked: list[Part] = []

    def plan(part: Part) -> StageTime:
        asked.append(part)
        return plans[part]

    found = best_division(n_layers, n_stages, bound_s=bounds.__getitem__, plan=plan)
    possible = {part: max(plans[part].plan_s, bounds[part]) for part in parts}
    least = min(cost(division, possible) for division in divisions)
    if math.isinf(least[0]):
        assert found.parts is None
    else:
        assert found.parts is not None
        assert cost(found.parts, possible) == least
        assert set(found.parts) <= set(asked)
    proven = {part: max(plans[part].lower_bound_s, bounds[part]) for part in parts}
    assert found.lower_bound_s <= min(cost(division, proven)[0] for division in divisions)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("n_layers", range(2, 9))
def test_the_bound_meets_the_best_division_where_its_plans_are_proven(n_layers: int) -> None:
    times = {
        part: float(part.end - part.first) + (0.5 if part.stage == 0 else 0.0)
        for division in all_divisions(n_layers, 2)
        for part in division
    }
    found = best_division(
        n_layers,
        2,
        bound_s=lambda part: float(part.end - part.first),
        plan=lambda part: StageTime(times[part], times[part]),
    )
    assert found.lower_bound_s == cost(found.parts, times)[0]


def test_stages_that_cannot_be_in_the_best_division_are_not_planned() -> None:
    asked: list[Part] = []

    def plan(part: Part) -> StageTime:
        asked.append(part)
        time_s = float(part.end - part.first)
        return StageTime(time_s, time_s)

    found = best_division(32, 4, bound_s=lambda part: float(part.end - part.first), plan=plan)
    assert found.parts == equal_parts(32, 4)
    assert len(asked) == 4  # of 32 x 31 / 2 runs of layers


def test_equal_parts() -> None:
    assert [p.end - p.first for p in equal_parts(10, 4)] == [3, 3, 2, 2]
    assert equal_parts(3, 3) == (Part(0, 0, 1), Part(1, 1, 2), Part(2, 2, 3))
