"""Overhead against budget: the same graph planned for many budgets.

A schedule that fits a budget fits every larger one, and a bound for a budget holds for every
smaller one. The sweep uses both: a faster schedule is carried up to larger budgets, a better bound
down to smaller ones. If its method can, each search starts from the schedule of the next smaller
budget. So along a method's curve neither the overhead nor the bound rises with the budget, no
matter what the method finds at a single budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.methods import METHODS, Method, find_obstacle
from solver.schedule import Obstacle, Places, Request, Schedule, Solution, simulate_unplanned
from solver.sizes_deadlines_progress import Deadline, check_time_limit, interrupted
from solver.solving import attempt, time_s, with_state_choices

N_BUDGETS = 20
BUDGET_SPACING_EXPONENT = 1.5
"""Exponent that spaces the budgets: evenly spaced shares of the range are raised to this power, so
that budgets are denser near the minimum, where a few percent more memory can halve the overhead.
"""
DEFAULT_REQUEST = Request(budget_bytes=0, time_limit_s=10.0)


class Budgets(tuple[int, ...]):
    """Budgets in bytes, and schedules that fit the least of them that has a known one.

    A sweep of these budgets starts its searches from the schedules, so it needs no time to find
    them again.
    """

    schedules: tuple[Schedule, ...]

    @classmethod
    def of(cls, sizes: Iterable[int], schedules: Iterable[Schedule] = ()) -> Budgets:
        budgets = cls(sizes)
        budgets.schedules = tuple(schedules)
        return budgets


@dataclass(frozen=True)
class Curve:
    """The result of a sweep over budgets and methods.

    graph: the plain step.
    points: one Solution for each method and budget, method by method, smallest budget first; it has
        no schedule if nothing was found.
    proven_bytes: no schedule fits a smaller budget (0: not searched for).
    quick: each point was searched for with a fraction of the work.
    """

    graph: Graph
    points: tuple[Solution, ...]
    proven_bytes: int = 0
    quick: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.method for point in self.points))

    def of(self, method: str) -> tuple[Solution, ...]:
        """The points of one method, smallest budget first."""
        return tuple(point for point in self.points if point.method == method)

    @property
    def least_planned_bytes(self) -> int | None:
        """The smallest budget with a plan (None: no point has one)."""
        budgets = (p.request.budget_bytes for p in self.points if p.schedule is not None)
        return min(budgets, default=None)


def sweep(
    step: Graph | Variants,
    *,
    budgets: Iterable[int] | None = None,
    n_budgets: int = N_BUDGETS,
    methods: Sequence[str] = ("auto",),
    like: Request = DEFAULT_REQUEST,
    quick: bool = False,
    known: Sequence[Solution] = (),
    on_point: Callable[[int, int], None] | None = None,
) -> Curve:
    """Plan the step for every budget with every method.

    budgets: bytes for the whole step, reserve included (None: `n_budgets` of them, chosen as by
        `default_budgets`). Those that `default_budgets` returned bring the schedule of the least.
    n_budgets: how many budgets to choose if none are given.
    methods: names of methods; the first one searches for the least budget.
    like: the request for each point, except for budget and method. Its time limit applies to each
        search, and to the search for the least budget if no budgets are given. So the sweep takes
        at most (n_budgets * n_methods + 1) times this limit.
    quick: do a fraction of the work in each search, if the method can.
    known: solutions for this step, made with the same request except for budget and method. They
        are used instead of planning again, and their budgets become points too. Those with budgets
        of reserved memory are ignored, since a curve is about allocated memory.
    on_point: called after each search with the number of points so far and in all.

    Within `ctrl_c_ends_searches`, Ctrl-C ends the sweep; it returns the points found until then.

    Raises ValueError if there is no budget, or if one is not above the reserve.
    """
    obstacles: tuple[Obstacle, ...] = ()
    reserve_bytes, places = like.reserve_bytes, like.places
    step = with_state_choices(step, places, where=like.optimizer_state, parameters=like.parameters)
    if budgets is None:
        obstacles = _find_obstacles(
            step, METHODS[methods[0]], places, time_limit_s=like.time_limit_s
        )
        budgets = _spaced_budgets(step, obstacles, places, n_budgets, reserve_bytes=reserve_bytes)
    reached = budgets.schedules if isinstance(budgets, Budgets) else ()
    known = [solution for solution in known if solution.request.budget_of == "allocated"]
    chosen = {*budgets, *(solution.request.budget_bytes for solution in known)}
    if not chosen or min(chosen) <= reserve_bytes:
        raise ValueError(
            f"the smallest budget is {min(chosen, default=0)} bytes; it must be above the reserve "
            f"of {reserve_bytes} bytes"
        )
    answers = {(s.method, s.request.budget_bytes): s for s in known}
    requests = [
        dataclasses.replace(like, budget_bytes=budget_bytes, method=method, budget_of="allocated")
        for method in methods
        for budget_bytes in sorted(chosen)
    ]
    points: list[Solution] = []
    for request in requests:
        if interrupted():
            break
        found = answers.get((request.method, request.budget_bytes))
        if found is None:
            # start from the schedules of smaller budgets, which fit; the last one per variant
            found_before = (p.schedule for p in points if p.method == request.method)
            starts = {s.graph_id: s for s in (*reached, *found_before) if s is not None}
            found = attempt(step, request, starts=tuple(starts.values()), quick=quick)
            if found.interrupted and found.status == "time_limit":  # nothing was found in time
                break
        points.append(found)
        if on_point is not None:
            on_point(len(points), len(requests))
    carried: list[Solution] = []
    for method in dict.fromkeys(point.method for point in points):
        carried += _schedules_carried_up([point for point in points if point.method == method])
    return Curve(
        graph=Variants.of(step).plain,
        points=tuple(_bounds_carried_down(carried)),
        proven_bytes=min((o.proven_bytes + reserve_bytes for o in obstacles), default=0),
        quick=quick,
    )


def default_budgets(
    step: Graph | Variants,
    *,
    method: str = "auto",
    reserve_bytes: int = 0,
    time_limit_s: float = 10.0,
    n_budgets: int = N_BUDGETS,
    places: Places | None = None,
) -> Budgets:
    """Budgets from the least feasible one found to the peak without checkpointing, denser near the
    least, with the schedule of the least one.

    method: the method that searches for the least budget.
    reserve_bytes: added to each budget.
    time_limit_s: for the search for the least budget; the least one found by then counts.
    n_budgets: how many budgets to return, about.
    places: host memory and disk that plans may copy to. The least budget is then found without
        copies, and there are smaller budgets too, down to what a single op needs, for which perhaps
        no plan is found.
    """
    check_time_limit(time_limit_s)
    step = with_state_choices(step, places)
    obstacles = _find_obstacles(step, METHODS[method], places, time_limit_s=time_limit_s)
    return _spaced_budgets(step, obstacles, places, n_budgets, reserve_bytes=reserve_bytes)


def _find_obstacles(
    step: Graph | Variants, method: Method, places: Places | None, *, time_limit_s: float
) -> tuple[Obstacle, ...]:
    """The least budget of each variant of the step, proven and reached."""
    deadline = Deadline.after(time_limit_s)
    return tuple(
        find_obstacle(graph, method=method, deadline=deadline, places=places)
        for graph in Variants.of(step).planned
    )


def _spaced_budgets(
    step: Graph | Variants,
    obstacles: Sequence[Obstacle],
    places: Places | None,
    n_budgets: int,
    *,
    reserve_bytes: int,
) -> Budgets:
    """The budgets from the least one to the peak of the baseline (BUDGET_SPACING_EXPONENT)."""
    peak_bytes = simulate_unplanned(Variants.of(step).plain).peak_bytes
    reached_bytes = min(obstacle.reached_bytes for obstacle in obstacles)
    may_copy = places is not None and places.host is not None
    least_bytes = min(o.proven_bytes for o in obstacles) if may_copy else reached_bytes
    n_steps = max(1, n_budgets - 1)
    shares = ((n / n_steps) ** BUDGET_SPACING_EXPONENT for n in range(n_steps + 1))
    sizes = {least_bytes + int(share * (peak_bytes - least_bytes)) for share in shares}
    return Budgets.of(
        (reserve_bytes + size for size in sorted(sizes | {reached_bytes})),
        (obstacle.schedule for obstacle in obstacles if obstacle.schedule is not None),
    )


def _schedules_carried_up(points: Sequence[Solution]) -> list[Solution]:
    """Replace each plan by that of a smaller budget if that one is faster.

    points: the solutions of one method, smallest budget first.
    """
    carried: list[Solution] = []
    best: Solution | None = None
    for point in points:
        if best is not None and time_s(best) < time_s(point):
            point = dataclasses.replace(
                point,
                graph=best.graph,
                schedule=best.schedule,
                simulation=best.simulation,
                status=best.status,
                obstacle=None,
            )
        if point.simulation is not None:
            best = point
        carried.append(point)
    return carried


def _bounds_carried_down(points: Sequence[Solution]) -> list[Solution]:
    """Give each point the best bound proven at its budget or any larger one, by any method."""
    best_s: dict[int, float] = {}
    running_s = 0.0
    for point in sorted(points, key=lambda p: p.request.budget_bytes, reverse=True):
        running_s = max(running_s, point.lower_bound_s)
        best_s[point.request.budget_bytes] = running_s
    return [point.with_bound(best_s[point.request.budget_bytes]) for point in points]
