"""From a Request to a simulated Solution.

Methods propose a schedule, `solver.simulate` decides what it costs and whether it fits, and
`solver.bound.lower_bound` proves how far it can be from the best. A new method is a function with
the signature that `methods.Method` describes, and a line in `methods.METHODS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from graphs.graph import Graph
from graphs.host_state import with_state_on_device
from graphs.rewrites import Variants, is_stock
from solver.bound import StorageGraph, least_time_s, lower_bound_s, relaxed_bound
from solver.methods import METHODS, find_obstacle, transfer_schedule
from solver.schedule import Request, Schedule, Simulation, Solution, simulate, simulate_unplanned
from solver.sizes_deadlines_progress import Deadline, interrupted, now_s
from solver.solving.answers import best, excess_bytes, fastest, solution_from_proposal, time_s
from solver.solving.improved import with_fastest_refined, with_more_proven
from solver.solving.state_choices import with_state_choices
from solver.solving.within_reserved import plan_within_reserved, with_reserved

KEPT_SHARE = 0.1
"""Share of the time left that is kept for the bound, or for explaining why nothing was found."""
LATER_VARIANTS_SHARE = 0.5
"""Share of the planning time left that is kept for the variants that are planned later."""
REFINING_SHARE = 0.3
"""Share of the time left that is kept for refining the fastest plan. At their least budgets, with
rewrites and a limit of 60 s, this and LATER_VARIANTS_SHARE give overheads of 47.7 % for ViT-B and
59.5 % for DenseNet-121, compared with 52.3 % and 64.3 % without refining and a tenth for later
variants.
"""
SIMILAR_BOUND_SHARE = 0.1
"""Bounds count as equal if they exceed the least bound by up to this share of the time that the
least bound loses over the baseline."""
FAR_GAP = 0.5
"""A plan whose gap is this share of the baseline's time or more is not used as a start for other
variants. At the least budget of DenseNet-121 the plain step's plan has a gap of 72 points; without
it as a start, the step with rewrites loses 40 % instead of 55 %.
"""
THOROUGH_TIME_LIMIT_S = 300.0
"""From this time limit on, minutes are spent on a better bound if a gap is left."""
N_POSITIONS = 3
"""How many positions have linear programs in the quick bound that ranks the variants."""


class NoPlainStepError(ValueError):
    """The plain step is needed, but only a rewritten one is known; the message says what to do."""


def answer(
    step: Graph | Variants,
    request: Request,
    *,
    starts: Sequence[Schedule] = (),
    thorough: bool = False,
) -> Solution:
    """Plan the step (`attempt`) and, if nothing is found, explain why (`with_obstacle`)."""
    deadline = Deadline.after(request.time_limit_s)
    found = attempt(step, request, starts=starts, thorough=thorough, deadline=deadline)
    return with_obstacle(found, deadline=deadline)


def attempt(
    step: Graph | Variants,
    request: Request,
    *,
    starts: Sequence[Schedule] = (),
    quick: bool = False,
    thorough: bool = False,
    deadline: Deadline | None = None,
) -> Solution:
    """Run the requested method on each variant of the step, simulate its proposals, take the best.

    starts: known schedules of the variants, for a method that can start from them.
    quick: do a fraction of the work, if the method can.
    thorough: spend minutes on a better bound, if the time limit is THOROUGH_TIME_LIMIT_S or more
        and the method can.
    deadline: when the answer is due (None: the request's time limit from now).
    """
    started_s = now_s()
    deadline = deadline or Deadline.after(request.time_limit_s)
    variants = with_state_choices(
        step, request.places, where=request.optimizer_state, parameters=request.parameters
    )
    thorough = (
        thorough
        and request.time_limit_s >= THOROUGH_TIME_LIMIT_S
        and request.budget_of == "allocated"
        and _is_one_pass_on_device(variants.plain, request)
    )

    def plan(request: Request) -> Solution:
        effort = {"quick": quick, "thorough": thorough}
        return _plan_variants(variants, request, starts=starts, deadline=deadline, **effort)

    if request.budget_of == "reserved":
        found = plan_within_reserved(request, variants.plain, plan)
    else:
        found = plan(request)
    was_interrupted = interrupted()
    return dataclasses.replace(
        found,
        variants=variants,
        solve_time_s=now_s() - started_s,
        timed_out=found.timed_out and not was_interrupted,
        interrupted=was_interrupted,
    )


def _is_one_pass_on_device(step: Graph, request: Request) -> bool:
    """Whether the step has one micro-batch in flight and its plan may not copy to the host."""
    return step.n_in_flight == 1 and (request.places is None or request.places.host is None)


def _plan_variants(
    variants: Variants,
    request: Request,
    *,
    starts: Sequence[Schedule],
    quick: bool,
    thorough: bool,
    deadline: Deadline,
) -> Solution:
    """`attempt` for a budget of allocated memory.

    Variants are planned in the order of their bounds, the least first. Each starts from those
    schedules of earlier variants that are near their bounds. A variant is skipped if its bound is
    no better than the best plan so far.
    """
    method = METHODS[request.method]
    may_refine = not quick and _is_one_pass_on_device(variants.plain, request)
    refine = method.refine if may_refine else None
    planning_deadline = (
        deadline if refine is None else deadline.earlier(REFINING_SHARE * deadline.left_s)
    )
    graphs_in_order = _planning_order(variants.planned, request, deadline)
    baseline = simulate_unplanned(variants.plain)
    answers: list[Solution] = []
    for index, (graph, bound_s) in enumerate(graphs_in_order, 1):
        if answers:
            best_so_far = fastest(answers)
            # an equally fast plan may be better if the best one takes more than no plan at all
            may_tie = bound_s == time_s(best_so_far) and excess_bytes(best_so_far) > 0
            if bound_s >= time_s(best_so_far) and not may_tie:
                continue
        known = [s for s in starts if s.graph_id == graph.graph_id]
        if method.takes_starts:
            known += [
                transfer_schedule(graph, earlier.schedule)
                for earlier in answers
                if earlier.schedule is not None and (earlier.gap or 0.0) < FAR_GAP
            ]
        is_last = all(later.graph_id == graph.graph_id for later, _ in graphs_in_order[index:])
        variant_deadline = (
            planning_deadline
            if is_last
            else planning_deadline.earlier(LATER_VARIANTS_SHARE * planning_deadline.left_s)
        )
        answers.append(
            _plan_variant(
                graph,
                request,
                baseline=baseline,
                starts=known,
                quick=quick,
                deadline=variant_deadline,
            )
        )
    if refine is not None:
        answers = with_fastest_refined(answers, refine=refine, deadline=deadline)
    if thorough and method.prove_more is not None:
        answers = with_more_proven(answers, prove_more=method.prove_more, deadline=deadline)
    return best(answers)


def _planning_order(
    graphs: Sequence[Graph], request: Request, deadline: Deadline
) -> list[tuple[Graph, float]]:
    """The variants in the order of planning, each with a lower bound in seconds.

    The least bound comes first. Variants with bounds within SIMILAR_BOUND_SHARE of the least keep
    the order in which they are given, the plain step first: a plan of one serves the next one too,
    which rewrites more and needs fewer bytes for it.
    """
    if len(graphs) == 1:
        return [(graphs[0], 0.0)]
    bounded = [(graph, _quick_bound_s(graph, request, deadline)) for graph in graphs]
    least_s = min(bound_s for _, bound_s in bounded)
    lost_s = least_s - min(graph.baseline_time_s for graph in graphs)

    def rank(each: tuple[Graph, float]) -> float:
        _, bound_s = each
        return least_s if bound_s <= least_s + SIMILAR_BOUND_SHARE * lost_s else bound_s

    return sorted(bounded, key=rank)


def _quick_bound_s(graph: Graph, request: Request, deadline: Deadline) -> float:
    """A quick lower bound in seconds on all plans of this variant (inf: nothing fits)."""
    budget_bytes, places = request.available_bytes, request.places
    if places is not None and places.host is not None:
        left_s = deadline.left_s
        return lower_bound_s(graph, budget_bytes=budget_bytes, time_limit_s=left_s, places=places)
    lost_share = relaxed_bound(
        StorageGraph.of(graph),
        budget_bytes=budget_bytes,
        n_positions=N_POSITIONS,
        deadline=deadline,
    )
    return least_time_s(graph, lost_share=lost_share)


def _plan_variant(
    graph: Graph,
    request: Request,
    *,
    baseline: Simulation,
    starts: Sequence[Schedule],
    quick: bool,
    deadline: Deadline,
) -> Solution:
    """Run the requested method on one variant, simulate its proposal, and bound it."""
    method = METHODS[request.method]
    proposal = method(
        graph,
        budget_bytes=request.available_bytes,
        time_limit_s=deadline.earlier(KEPT_SHARE * deadline.left_s).left_s,
        seed=request.seed,
        starts=starts,
        quick=quick,
        places=request.places,
    )
    bound_s = max(proposal.lower_bound_s, graph.baseline_time_s)
    if not method.proves_bound:
        cut_s = lower_bound_s(
            graph,
            budget_bytes=request.available_bytes,
            time_limit_s=deadline.left_s,
            places=request.places,
        )
        bound_s = max(bound_s, cut_s)
    proposal = dataclasses.replace(proposal, lower_bound_s=bound_s)
    return solution_from_proposal(graph, request, proposal, baseline=baseline)


def with_obstacle(solution: Solution, *, deadline: Deadline | None = None) -> Solution:
    """If the solution has no schedule, add the obstacle: the least budget and the bottleneck op.

    If the schedule of the least budget fits after all, because the time limit ended the earlier
    search, it becomes the solution's schedule. The time is added to the solve time.

    deadline: when the answer is due (None: what is left of the request's time limit, but at least
        KEPT_SHARE of it). The obstacle notes if that was too little (`cut_short`).
    """
    if solution.schedule is not None or solution.obstacle is not None:
        return solution
    started_s, request = now_s(), solution.request
    if deadline is None:
        left_s = request.time_limit_s - solution.solve_time_s
        deadline = Deadline.after(max(KEPT_SHARE * request.time_limit_s, left_s))
    graphs = solution.step.planned
    # each variant gets an equal share of the time left
    obstacles = [
        find_obstacle(
            graph,
            method=METHODS[solution.method],
            above_bytes=request.available_bytes + 1,
            seed=request.seed,
            deadline=Deadline.after(deadline.left_s / (len(graphs) - index)),
            places=request.places,
        )
        for index, graph in enumerate(graphs)
    ]
    least = min(range(len(graphs)), key=lambda index: obstacles[index].reached_bytes)
    obstacle = dataclasses.replace(
        obstacles[least], proven_bytes=min(each.proven_bytes for each in obstacles)
    )
    solution = dataclasses.replace(
        solution,
        graph=graphs[least],
        solve_time_s=solution.solve_time_s + now_s() - started_s,
        interrupted=solution.interrupted or (obstacle.cut_short and interrupted()),
    )
    if request.budget_of == "reserved":
        obstacle = with_reserved(obstacle, solution.graph)
    if obstacle.schedule is None or obstacle.reached_bytes > request.available_bytes:
        return dataclasses.replace(solution, obstacle=obstacle)
    simulation = simulate(solution.graph, obstacle.schedule, places=request.places)
    found = dataclasses.replace(solution, schedule=obstacle.schedule, simulation=simulation)
    return found.with_bound(solution.lower_bound_s)


def for_stock_modules(solution: Solution) -> Iterator[Solution]:
    """Yield solutions for the same request whose steps stock PyTorch modules can run.

    They use no other rewrites than stock modules can, and keep optimizer state and parameters on
    the device. First comes the given solution if it is of this kind, else the best one that is;
    then one for each other such variant. Some may have no schedule.

    Raises NoPlainStepError if only a rewritten graph is known, and not the plain step.
    """
    request = dataclasses.replace(solution.request, optimizer_state="device", parameters="device")
    steps = _stock_steps(solution)
    first = solution
    if not is_stock(solution.graph.meta.rewrites) or solution.graph.host_state_bytes:
        if not steps:
            made_with = ", ".join(solution.plain.meta.rewrites)
            raise NoPlainStepError(
                f"the graph of this plan was made with {made_with}, and the plain step, which "
                "PyTorch runs, is not in the file; plan again from the model, with "
                'rewrites="none"'
            )
        first = answer(Variants(solution.plain, steps), request)
    yield first
    for step in steps:
        if step.graph_id != first.graph.graph_id:
            yield answer(Variants(solution.plain, (step,)), request)


def _stock_steps(solution: Solution) -> tuple[Graph, ...]:
    """The variants that stock modules can run, the plain step included, sharded as the solution's
    graph is; () if the plain step is not known."""
    if solution.plain.meta.rewrites:
        return ()
    others: tuple[Graph, ...] = ()
    if (known := solution.variants) is not None:
        others = known.planned if known.stock is None else known.stock.graphs
    sharding = solution.graph.meta.environment.get("sharding")
    stock = (
        with_state_on_device(graph)
        for graph in (solution.plain, *others)
        if is_stock(graph.meta.rewrites) and graph.meta.environment.get("sharding") == sharding
    )
    return tuple({graph.graph_id: graph for graph in stock}.values())
