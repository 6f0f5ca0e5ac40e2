"""Divide layers into pipeline stages so that the slowest stage is as fast as possible.

Planning a stage is expensive, so few are planned. A stage that is not planned yet counts with a
lower bound on the time of its plan. Dynamic programming finds the best division by these numbers;
then one of its unplanned stages is planned, and so on. Once all stages of the best division are
planned, it is the optimum: by plans or bounds, the slowest stage of every other division is no
faster. So the result is the same as from planning every stage of every division (as AdaPipe,
ASPLOS 2024, does).

Cost: O(n_stages n_layers^2) for each stage that is planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """A stage with its layers: `first` to `end`, the latter excluded."""

    stage: int
    first: int
    end: int


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage.

    plan_s: time of the plan that was found (inf: none was).
    lower_bound_s: no plan is faster (inf: none fits).
    """

    plan_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class Division:
    """The best division.

    parts: the layers of each stage (None: no division has a plan for each of its stages).
    lower_bound_s: in no division, with any plans, is the slowest stage faster.
    """

    parts: tuple[Part, ...] | None
    lower_bound_s: float


def equal_parts(n_layers: int, n_stages: int) -> tuple[Part, ...]:
    """Equal numbers of layers in all stages; the first stages get one more if there is a rest."""
    size, n_larger = divmod(n_layers, n_stages)
    ends = [(i + 1) * size + min(i + 1, n_larger) for i in range(n_stages)]
    return tuple(Part(i, ends[i - 1] if i else 0, end) for i, end in enumerate(ends))


def best_division(
    n_layers: int,
    n_stages: int,
    *,
    bound_s: Callable[[Part], float],
    plan: Callable[[Part], StageTime],
) -> Division:
    """The division whose slowest stage is fastest; of several, the one with the least total time.

    bound_s: seconds that every plan of the part takes at least (inf: it cannot be a stage).
    plan: plans a part; called at most once for each part, and only if it is needed.
    """
    planned: dict[Part, StageTime] = {}
    bounds = {part: bound_s(part) for part in _parts(n_layers, n_stages)}
    times_s = dict(bounds)
    while True:
        found = _fastest_division(n_layers, n_stages, times_s)
        unplanned = [part for part in found or () if part not in planned]
        if not unplanned:
            break
        part = max(unplanned, key=bounds.__getitem__)
        planned[part] = plan(part)
        times_s[part] = planned[part].plan_s
    bounds_s = bounds | {part: each.lower_bound_s for part, each in planned.items()}
    return Division(
        found, _least_slowest_times_s(n_layers, n_stages, bounds_s)[n_stages - 1, n_layers]
    )


def _parts(n_layers: int, n_stages: int) -> list[Part]:
    """Every part of every division in which each stage has at least one layer, stage by stage."""
    return [
        Part(stage, first, end)
        for stage in range(n_stages)
        for first in ((0,) if stage == 0 else range(stage, n_layers))
        for end in range(first + 1, n_layers - (n_stages - 1 - stage) + 1)
        if stage < n_stages - 1 or end == n_layers
    ]


def _least_slowest_times_s(
    n_layers: int, n_stages: int, times_s: Mapping[Part, float]
) -> dict[tuple[int, int], float]:
    """(stage, layer where it ends) -> the least time of the slowest stage up to this one."""
    least: dict[tuple[int, int], float] = {}
    for part in _parts(n_layers, n_stages):  # stage by stage
        before_s = 0.0 if part.stage == 0 else least.get((part.stage - 1, part.first), math.inf)
        key = part.stage, part.end
        least[key] = min(least.get(key, math.inf), max(before_s, times_s[part]))
    return least


def _fastest_division(
    n_layers: int, n_stages: int, times_s: Mapping[Part, float]
) -> tuple[Part, ...] | None:
    """The division with the fastest slowest stage, and of several the one with the least sum.

    None if the slowest stage of every division takes inf.
    """
    slowest_s = _least_slowest_times_s(n_layers, n_stages, times_s)[n_stages - 1, n_layers]
    if math.isinf(slowest_s):
        return None
    sums: dict[tuple[int, int], tuple[float, tuple[Part, ...]]] = {(-1, 0): (0.0, ())}
    for part in _parts(n_layers, n_stages):
        if times_s[part] > slowest_s or (part.stage - 1, part.first) not in sums:
            continue
        sum_s, parts = sums[part.stage - 1, part.first]
        key, total_s = (part.stage, part.end), sum_s + times_s[part]
        if key not in sums or total_s < sums[key][0]:
            sums[key] = total_s, (*parts, part)
    return sums[n_stages - 1, n_layers][1]
