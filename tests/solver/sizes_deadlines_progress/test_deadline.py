"""The time limit: refused where it is none, and once it has passed every loop of a search ends.

The clock is a counter here: each look at it is one second later than the one before. So a search
that is given n seconds is past its deadline after n looks, whatever the machine, and one that
looks on and on after that has a loop which does not stop.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest

from graphs.files import FormatError
from graphs.graph import Graph
from solver import solve
from solver.bound.cut import CutMilp, solve_cuts
from solver.bound.milp import Answer, Milp
from solver.bound.storage_graph import StorageGraph
from solver.methods.auto.from_cuts import schedule_from_cuts
from solver.methods.auto.local_optimum import drop_recomputation
from solver.methods.auto.menu_program import MenuMilp
from solver.methods.evict import evict
from solver.methods.ilp import ilp
from solver.methods.ilp_variables import Stages
from solver.methods.least_budget import find_obstacle
from solver.methods.revolve import reversals
from solver.schedule.solution import Request, SavedSchedule
from solver.sizes_deadlines_progress import deadline as clock
from solver.sizes_deadlines_progress.deadline import NEVER, Deadline, OutOfTimeError
from solver.solving import KEPT_SHARE, answer, attempt, with_obstacle
from tests.support import synthetic_graphs
from tests.support.budgets import budget_above_least
from tests.support.paths import GPT2 as GPT2_PATH

GRAPH = synthetic_graphs.recurrent(n_steps=5)
GPT2 = Graph.load(GPT2_PATH)
PAST = Deadline(-math.inf)
AFTERWARDS = 40
"""Looks at the clock after the deadline that a search may take, one or two for each level of calls;
a loop that does not stop takes hundreds."""
N_MOMENTS = 6
"""At which the clock runs out, spread over the search."""


class Counter:
    """A clock that is a second later at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    found = Counter()
    monkeypatch.setattr(clock, "now_s", found)
    # A counted second is no second for the linear programs: they get as long as they like.
    solved = Milp.solve

    def at_once(self: Milp, *, deadline: Deadline = NEVER, **options: Any) -> Answer:
        return solved(self, deadline=PAST if deadline.passed else NEVER, **options)

    monkeypatch.setattr(Milp, "solve", at_once)
    monkeypatch.setattr("solver.methods.least_budget.BASE_WORK", 100_000)
    monkeypatch.setattr("solver.methods.auto.stages.MAX_WORK", 100_000)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "dp", "sqrt", "revolve", "every_block"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_every_loop_ends_at_the_deadline(method: str, share: float, counter: Counter) -> None:
    """Wherever in the search the clock runs out, it is looked at a few times more and no more."""
    request = Request(budget_above_least(GRAPH, share), method=method, time_limit_s=1e9)
    full = answer(GRAPH, request)
    n_looks = counter.looks
    for limit_s in sorted({1 + n_looks * k // N_MOMENTS for k in range(N_MOMENTS)}):
        counter.looks = 0
        found = answer(GRAPH, dataclasses.replace(request, time_limit_s=float(limit_s)))
        assert counter.looks <= limit_s + AFTERWARDS
        if found.simulation is not None:
            assert found.simulation.peak_bytes <= request.available_bytes
        assert found.timed_out or found.obstacle is not None or found.simulation == full.simulation


def test_the_clock_that_does_not_run_out_changes_nothing(counter: Counter) -> None:
    """However long the limit, the same answer: counts end the search, not the clock."""
    request = Request(budget_above_least(GRAPH, 0.3), time_limit_s=1e9)
    longer = dataclasses.replace(request, time_limit_s=1e12)
    one, other = answer(GRAPH, request), answer(GRAPH, longer)
    assert not one.timed_out
    assert (one.schedule, one.lower_bound_s) == (other.schedule, other.lower_bound_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "share"),
    [
        (synthetic_graphs.u_shape(depth=3), 0.3),
        (synthetic_graphs.pyramid(n_blocks=(1, 2, 1)), 0.4),
        (GPT2, 0.5),
    ],
    ids=["u_shape", "pyramid", "gpt2"],
)
def test_the_speed_of_the_clock_decides_nothing(
    graph: Graph, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a search sees more of its time gone; it finds the same all the same."""
    budget_bytes = budget_above_least(graph, share)
    for method in ("auto", "dp"):
        request = Request(budget_bytes, method=method, time_limit_s=1e6)
        idle = answer(graph, request)
        with monkeypatch.context() as patched:
            patched.setattr(clock, "now_s", lambda: 5e3 * time.monotonic())
            busy = answer(graph, request)
        assert not idle.timed_out
        assert not busy.timed_out
        assert (idle.schedule, idle.lower_bound_s) == (busy.schedule, busy.lower_bound_s)


def test_parts_end_at_a_deadline_in_the_past() -> None:
    step, budget_bytes = StorageGraph.of(GRAPH), budget_above_least(GRAPH, 0.3)
    base = int(step.least_bytes.argmax())
    thrifty = schedule_from_cuts(step, {base: frozenset()})
    assert drop_recomputation(step, thrifty, budget_bytes=10**15) != thrifty
    assert drop_recomputation(step, thrifty, budget_bytes=10**15, deadline=PAST) is thrifty
    assert evict(step, budget_bytes=budget_bytes)[0] is not None
    late, _ = evict(step, budget_bytes=int(step.least_bytes.max()), deadline=PAST)
    assert late is None
    cuts = solve_cuts(
        step, positions=[base], budget_bytes=budget_bytes, as_milp=True, deadline=PAST
    )
    assert (cuts.kept, cuts.lost_share, cuts.timed_out) == (None, 0.0, True)
    options: Any = {"budget_bytes": budget_bytes, "allowance_bytes": {}, "deadline": PAST}
    for run in (
        lambda: schedule_from_cuts(step, {}, deadline=PAST),
        lambda: CutMilp(step, positions=[base], **options),
        lambda: MenuMilp(step, positions=[base], menu=(), base=base, **options),
        lambda: Stages(step, budget_bytes=budget_bytes, n_sweeps=1, deadline=PAST),
        lambda: next(reversals(GRAPH, deadline=PAST)),
    ):
        with pytest.raises(OutOfTimeError):
            run()
    found = ilp(GRAPH, budget_bytes=budget_bytes, time_limit_s=0.0, seed=0)
    assert (found.schedule, found.timed_out) == (None, True)


def test_an_obstacle_that_is_cut_short_says_so() -> None:
    whole, part = find_obstacle(GRAPH), find_obstacle(GRAPH, deadline=PAST)
    assert not whole.cut_short
    assert part.cut_short
    assert part.proven_bytes <= whole.reached_bytes <= part.reached_bytes


def test_some_of_the_limit_is_kept_for_the_reason(counter: Counter) -> None:
    """A search that finds nothing ends sooner, so that there is time to look for the least budget;
    a method's own least budget, too, is looked for within the limit."""
    for method in ("auto", "sqrt"):
        counter.looks = 0
        request = Request(budget_above_least(GRAPH, 0.0) - 1, method=method, time_limit_s=2000.0)
        found = attempt(GRAPH, request)
        assert found.schedule is None
        assert counter.looks <= (1 - KEPT_SHARE) * request.time_limit_s + AFTERWARDS
        told = with_obstacle(found, deadline=Deadline(request.time_limit_s))
        assert told.obstacle is not None
        assert counter.looks <= request.time_limit_s + AFTERWARDS


@pytest.mark.parametrize("limit_s", [0, -1, -0.5, math.nan, math.inf, "60", None, True])
def test_limits_that_are_none_are_refused(limit_s: Any) -> None:
    words = rf"time_limit_s is {limit_s!r}; .* a finite number above zero, such as 60"
    with pytest.raises(ValueError, match=words):
        solve(GRAPH, budget="1GB", time_limit_s=limit_s)
    with pytest.raises(ValueError, match=words):
        Request(10**9, time_limit_s=limit_s)


@pytest.mark.parametrize("limit", ["-1.0", "0", "0.0"])
def test_a_file_with_such_a_limit_is_refused(limit: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    solve(GRAPH, budget=10**12).save(path)
    path.write_text(path.read_text().replace('"time_limit_s": 60.0', f'"time_limit_s": {limit}'))
    with pytest.raises(FormatError, match=r"request: field 'time_limit_s' is (-1|0)"):
        SavedSchedule.load(path)
