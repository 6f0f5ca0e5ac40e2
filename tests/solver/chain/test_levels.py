"""Snapshots on several levels: the published tables, exhaustive search, actions run one by one."""

from __future__ import annotations

import json
import math
import random

import pytest

from solver.chain import (
    Level,
    cost_of,
    disk_revolve,
    hrevolve,
    multistage,
    n_extra_steps,
    periodic_disk_revolve,
)
from solver.chain.levels import period
from tests.support.brute_force_chain_levels import Slots, least_cost, replayed
from tests.support.paths import DATA

PUBLISHED = json.loads((DATA / "storage_levels.json").read_text())
ENDLESS = 10**6


def as_levels(slots: Slots) -> list[Level]:
    return [Level(*each) for each in slots]


def checked(n_steps: int, actions, slots: Slots) -> float:
    """The cost of the actions, which have to be legal; inf where there are none."""
    if actions is None:
        return math.inf
    cost = replayed(n_steps, actions, slots)
    assert cost_of(actions, as_levels(slots)) == pytest.approx(cost)
    return cost


def test_disk_revolve_of_aupy_herrmann_hovland_robert_2016() -> None:
    """Opt_inf, theorem 3.15."""
    assert len(PUBLISHED["disk_revolve"]) == 144
    for n_steps, n_memory, write, read, published in PUBLISHED["disk_revolve"]:
        slots = [(n_memory, 0.0, 0.0), (ENDLESS, write, read)]
        memory, disk = as_levels(slots)
        found = disk_revolve(n_steps=n_steps, levels=(memory, disk))
        assert checked(n_steps, found, slots) == pytest.approx(published)


def test_hrevolve_of_herrmann_and_pallez_2020() -> None:
    """Hopt for two levels, section 3.1."""
    assert len(PUBLISHED["hrevolve"]) == 432
    for n_steps, n_memory, n_disk, write, read, published in PUBLISHED["hrevolve"]:
        slots = [(n_memory, 0.0, 0.0), (n_disk, write, read)]
        found = hrevolve(n_steps=n_steps, levels=as_levels(slots))
        assert checked(n_steps, found, slots) == pytest.approx(published)


def test_the_period_of_aupy_and_herrmann_2017() -> None:
    for n_memory, write, read, published, most in PUBLISHED["period"]:
        memory, disk = Level(n_memory), Level(0, write, read)
        assert period(memory=memory, disk=disk, n_steps=most) == published


def test_a_period_costs_little_more_than_the_best_on_long_chains() -> None:
    for n_memory, write, read, _, _ in PUBLISHED["period"]:
        slots = [(n_memory, 0.0, 0.0), (ENDLESS, float(write), float(read))]
        memory, disk = as_levels(slots)
        for n_steps in (1, 2, 17, 60):
            best = disk_revolve(n_steps=n_steps, levels=(memory, disk))
            found = periodic_disk_revolve(n_steps=n_steps, levels=(memory, disk))
            least, cost = checked(n_steps, best, slots), checked(n_steps, found, slots)
            assert least - 1e-9 <= cost <= 1.1 * least


@pytest.mark.slow
def test_multistage_of_stumm_and_walther_2009() -> None:
    """The fewest steps, and no more writes and reads of the disk than the published reversal."""
    for n_steps, n_memory, n_disk, n_published in PUBLISHED["multistage"]:
        slots = [(n_memory, 0.0, 0.0), (n_disk, 1.0, 1.0)]
        found = multistage(n_steps=n_steps, levels=as_levels(slots))
        fewest = n_extra_steps(n_steps=n_steps, n_snapshots=min(n_memory + n_disk, n_steps))
        n_forward = sum(stop - start for kind, start, stop in found if kind == "advance")
        assert n_forward == fewest
        n_on_disk = checked(n_steps, found, slots) - fewest
        assert n_on_disk <= n_published


def random_levels(rng: random.Random) -> Slots:
    write = read = 0.0
    slots = []
    for k in range(rng.randint(1, 3)):
        if k or rng.random() < 0.3:
            write, read = write + rng.choice((0, 0.5, 1, 2)), read + rng.choice((0, 0.5, 1, 2))
        slots.append((rng.choice((0, 1, 1, 2, 3)), write, read))
    return slots


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("seed", range(24))
def test_no_schedule_of_a_short_chain_costs_less(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        n_steps, slots = rng.randint(1, 6), random_levels(rng)
        levels, truth = as_levels(slots), least_cost(n_steps, slots)
        assert checked(n_steps, hrevolve(n_steps=n_steps, levels=levels), slots) == truth
        assert checked(n_steps, multistage(n_steps=n_steps, levels=levels), slots) >= truth
        if len(slots) == 2:
            endless = [slots[0], (n_steps, *slots[1][1:])]
            truth = least_cost(n_steps, endless)
            memory, disk = levels
            found = disk_revolve(n_steps=n_steps, levels=(memory, disk))
            assert checked(n_steps, found, endless) == truth
            found = periodic_disk_revolve(n_steps=n_steps, levels=(memory, disk))
            assert checked(n_steps, found, endless) >= truth


def test_one_level_is_revolve() -> None:
    for n_steps in (1, 2, 7, 30, 61):
        for n_snapshots in (1, 2, 3, 8, 70):
            found = hrevolve(n_steps=n_steps, levels=[Level(n_snapshots)])
            cost = checked(n_steps, found, [(n_snapshots, 0.0, 0.0)])
            assert cost == n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots)


def test_without_snapshots_only_one_step_can_be_reversed() -> None:
    for reverse in (hrevolve, multistage):
        assert reverse(n_steps=2, levels=[Level(0), Level(0)]) is None
        assert reverse(n_steps=1, levels=[Level(0)]) == (("reverse", 1, 0),)
    with pytest.raises(ValueError, match="at least one of each"):
        hrevolve(n_steps=0, levels=[Level(1)])
