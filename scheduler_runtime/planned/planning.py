"""Plan a step that was just traced: reuse a known plan if one is good enough, else search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphs.graph import Graph
from graphs.rewrites import Variant, Variants, allowed_variants
from graphs.trace import CapturedStep
from solver.methods import WITHOUT_RECOMPUTATION, KnownPlan, reuse_plan, transfer_schedule
from solver.schedule import Request, Solution
from solver.solving import answer

N_TRIED = 4
"""How many of the known plans are tried: the latest ones."""


@dataclass(frozen=True)
class NewPlan:
    """A plan, and whether it was made from a known plan without a search (`reused`)."""

    solution: Solution
    reused: bool


def new_plan(
    step: CapturedStep,
    surround: Callable[[Graph], Graph],
    request: Request,
    *,
    planned: Sequence[Variant],
    known: Sequence[KnownPlan],
    surround_unplanned: Callable[[Graph], Graph] | None = None,
) -> NewPlan:
    """Plan this step for the request.

    surround: adds the loss and the optimizer to the graph of the module.
    planned: the variants (sets of rewrites) to plan.
    known: plans of the same module for other calls.
    surround_unplanned: as `surround`, for the step without a plan (None: `surround`).
    """
    # A plan is not reused if copies to the host are possible or the budget is of reserved memory:
    # reuse carries no copies over, its quick bound knows none, and it does not model the allocator.
    if request.places is not None or request.budget_of == "reserved":
        known = ()
    plain = (surround_unplanned or surround)(step.with_rewrites(()).graph)
    if known and (found := _reuse(step, surround, request, plain, planned=planned, known=known)):
        return NewPlan(found, reused=True)
    graphs = [(surround(each.graph), each.captured) for each in step.variants(planned)]
    variants = replace(allowed_variants(graphs, planned, runs_here=True), plain=plain)
    starts = [
        transfer_schedule(graph, each.schedule)
        for graph in variants.planned
        for each in known[-N_TRIED:]
    ]
    return NewPlan(answer(variants, request, starts=starts), reused=False)


def _reuse(
    step: CapturedStep,
    surround: Callable[[Graph], Graph],
    request: Request,
    plain: Graph,
    *,
    planned: Sequence[Variant],
    known: Sequence[KnownPlan],
) -> Solution | None:
    """The step without recomputation if that fits, else the fastest reusable known plan, if any."""

    @functools.cache
    def variants_with(variant: Variant) -> Variants:
        graphs = [(surround(each.graph), each.captured) for each in step.variants([variant])]
        return replace(allowed_variants(graphs, [variant], runs_here=True), plain=plain)

    found: list[Solution] = []
    for each in (WITHOUT_RECOMPUTATION, *known[-N_TRIED:]):
        if each.rewrites not in planned or not variants_with(each.rewrites).planned:
            continue
        solution = reuse_plan(variants_with(each.rewrites), each, request)
        if solution is not None and each is WITHOUT_RECOMPUTATION:
            return solution
        found += [solution] if solution is not None else []
    return min(found, key=lambda s: s.overhead or 0.0, default=None)
