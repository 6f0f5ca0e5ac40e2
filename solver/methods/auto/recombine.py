"""Combine the recomputation of schedules seen before into the best schedule.

Each schedule that the search has simulated, whether it fits or not, recomputes certain nodes right
before certain positions (the first computation of a node). All of these pairs together are a menu.
`solver.methods.auto.menu_program` finds the best choice from a menu. Its rows do not count the
bytes that recomputation itself takes between two positions. Where the schedule exceeds the budget,
the position gets an allowance and the program is solved again.

A short program is solved well where a long one stops at its root. So there are several menus, each
with what the best schedule recomputes: first all that was seen, if that is short; then what the
schedules most similar to the best recompute, while that is short; then what the LP of everything
left uses. The LPs take tenths of a second for all menus together, and what one menu has used is
left out of the next. On ResNet-101 at 10 %, menus of whole schedules alone took 41 of 48 processor
seconds. With rounded byte rows, and without a row that requires less time than the best schedule's,
the root of branch and bound finds nearly everything that the whole search finds.

It proves nothing about schedules that recompute elsewhere. If the program is solved to the end, the
result is never worse than the schedules that made the menu, and often much better: evictions and
cuts each get some part of the step right.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

from solver.methods.auto.from_cuts import FoldedSimulation
from solver.methods.auto.menu_program import (
    GAP,
    MAX_MENU,
    Menu,
    kept_by_best,
    menu_program,
    recomputed_by_best,
)
from solver.methods.auto.search import Search

MAX_MENU_ENTRIES, MAX_MENU_MULTIPLE = 150, 2.5
"""A menu of whole schedules has no more entries than MAX_MENU_ENTRIES, or than MAX_MENU_MULTIPLE
times those of the best schedule. Without MAX_MENU_ENTRIES the U-Net with rewrites at 20 %, whose
best schedule was short and of another step, lost 21.2 % instead of 20.3.
"""
MAX_FULL_MENU = 400
"""Entries up to which the menu of all schedules is solved first. Short menus alone led the U-Net
with rewrites at its minimum budget to 64.0 % instead of 62.9. A program of twice as many takes half
a minute (ResNet-50).
"""
MAX_ROUNDS = 4
"""Maximum solves of one menu, each with larger allowances."""

MAX_WORK = 12_000_000
"""Limit on the sum of squared columns over all programs, about ten seconds."""
N_ROUNDS, LEAST_ROUND_GAIN = 2, 2e-3
"""Maximum rounds of menus; another follows only if one gained this share of the baseline's time."""

GROWTH = 2
"""How many times as long the next menu of schedules is, at least."""


def recombine(search: Search, *, base: int) -> None:
    """Offer the best schedules from one menu after the other.

    base: the binding position.
    """
    work, without_gain = 0, set[Menu]()
    for menu in _menus(search, base):
        if search.is_close or work > MAX_WORK:
            return
        if menu not in without_gain:
            before = search.best_share
            work += _offer_best(search, menu, base)
            if search.best_share == before:
                without_gain.add(menu)


def _menus(search: Search, base: int) -> Iterator[Menu]:
    """Menus that contain the best schedule so far; again if the first round gained enough."""
    everything = recomputed_by_best(search).union(*search.menus)
    if len(everything) <= MAX_FULL_MENU:
        yield everything
    for _ in range(N_ROUNDS):
        before = search.best_share
        yield from _menus_of_similar_schedules(search)
        yield from _menus_from_lp(search, base)
        if search.best_share > before - LEAST_ROUND_GAIN:
            return


def _menus_of_similar_schedules(search: Search) -> Iterator[Menu]:
    """Longer and longer menus of whole schedules, those most similar to the best first."""
    remaining, length = list(search.menus), 0
    while True:
        menu = best = recomputed_by_best(search)
        remaining = [each for each in remaining if not each <= best]
        for each in sorted(remaining, key=lambda each: len(each - best)):
            menu |= each  # the one that adds the least to what the best recomputes
            if len(menu) >= GROWTH * length:
                break
        if not remaining or (
            best and len(menu) > max(MAX_MENU_ENTRIES, MAX_MENU_MULTIPLE * len(best))
        ):
            return
        remaining, length = [each for each in remaining if not each <= menu], len(menu)
        yield menu


def _menus_from_lp(search: Search, base: int) -> Iterator[Menu]:
    """Menus of what the LP of all schedules' recomputation uses, until they no longer gain."""
    remaining = Menu().union(*search.menus)
    before = math.inf
    while search.best_share < before - GAP or not search.best:
        best, before = recomputed_by_best(search), search.best_share
        if len(remaining | best) > MAX_MENU:
            return
        program = menu_program(search, remaining | best, base=base)
        values = program.program.solve(as_milp=False, deadline=search.deadline).values
        used = Menu() if values is None else program.entries(values)
        if used <= best:
            return
        yield used | best
        remaining -= used | best


def _offer_best(search: Search, menu: Menu, base: int) -> int:
    """Offer the best schedule from the menu, with allowances where it exceeds the budget.

    Returns the work: the sum of the squared columns of its programs.
    """
    budget_bytes = search.budget_bytes
    allowance_bytes: dict[int, int] = {}
    before: FoldedSimulation | None = None
    work = 0
    for _ in range(MAX_ROUNDS):
        program = menu_program(search, menu, base=base, allowance_bytes=allowance_bytes)
        if search.is_done:
            break
        work += program.n_columns**2
        guide = kept_by_best(program, below=search.best_share, deadline=search.deadline)
        if guide is None:
            break
        found = search.offer_cuts(guide)
        if found is None or found.simulation.peak_bytes <= budget_bytes:
            break
        if before is not None and found.stage_bytes == before.stage_bytes:  # no effect
            break
        before = found
        positions = program.positions
        for p, live_bytes in enumerate(found.stage_bytes):
            if live_bytes > budget_bytes:
                # What was recomputed before p lies between two of the program's positions.
                k = min(bisect_left(positions, p), len(positions) - 1)
                for q in positions[max(0, k - 1) : k + 1]:
                    allowance_bytes[q] = allowance_bytes.get(q, 0) + live_bytes - budget_bytes
    return work
