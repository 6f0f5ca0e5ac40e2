"""Warnings about plans made in the middle of a training, with their cost, reason and a remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphs.training_step import FRESH
from scheduler_runtime.planned.mismatch import Difference, Resized
from solver.schedule import Solution, plan_line

logger = logging.getLogger(__name__)


def plan_summary(solution: Solution, *, is_reused: bool, took_s: float) -> str:
    """Describe a finished plan in one line, with the shapes that it is for.

    is_reused: whether it was made without a search: from an earlier plan, or since the step fits
        without recomputation.
    took_s: how long the call has waited, tracing included.
    """
    graph, found = solution.graph, solution.simulation
    carries = bool(graph.meta.rewrites or (found is not None and found.n_recomputed))
    how = "planned from an earlier plan" if is_reused and carries else "planned"
    what = _shapes(solution.environment)
    if graph.meta.gradients not in ("", FRESH):
        what += " with accumulated gradients"
    return plan_line(solution, how=f"{how} for {what}", took_s=took_s)


def warn_of_another_plan(
    line: str,
    difference: Difference,
    *,
    n_plans: int,
    given: set[str],
    all_took_s: float | None = None,
) -> None:
    """Warn that one more kind of call was planned, why, and how to need fewer plans.

    line: the plan as `plan_summary` describes it.
    difference: how the call differs from the plans so far.
    n_plans: number of plans made so far, this one included.
    given: remedies that this model's warnings have given; none is given twice. Updated.
    all_took_s: how long all plans together have taken (None: not shown).
    """
    so_far = "" if all_took_s is None else f", {all_took_s:.1f} s in all"
    possible = [difference.remedy] if difference.remedy else _remedies(difference.resized, n_plans)
    remedies = [each for each in possible if each not in given]
    given.update(remedies)
    text = "".join(f". {each}" for each in remedies)
    logger.warning("%s. Plan %d%s: %s%s", line, n_plans, so_far, difference, text)


def _shapes(environment: Mapping[str, Any]) -> str:
    """The arguments, grouped by shape: "x [8, 32], input_ids and 1 more [8, 64]"."""
    shapes: Sequence[Sequence[int]] = environment["shapes"]
    names: Sequence[str] = environment.get("arguments") or ["a tensor"] * len(shapes)
    by_shape: dict[str, list[str]] = {}
    for name, shape in zip(names, shapes, strict=True):
        by_shape.setdefault(str(list(shape)), []).append(name)
    described: list[str] = []
    for form, (first, *others) in by_shape.items():
        described.append(f"{first}{f' and {len(others)} more' if others else ''} {form}")
    return ", ".join(described) or "no tensors"


_TOKENS = (
    "Remedy: pad the batches to a few sizes (pad_to_multiple_of=64 of the data collator, "
    'padding="max_length" of the tokenizer)'
)


def _remedies(resized: Resized | None, n_plans: int) -> Iterator[str]:
    if resized is None:
        return
    if resized.dimensions == {0} and not resized.is_larger and n_plans <= 3:
        yield (
            "A short last batch is planned once (twice with gradient accumulation); "
            "DataLoader(drop_last=True) leaves it out"
        )
        return
    yield _TOKENS if resized.of_tokens else "Remedy: use batches of a few fixed sizes"
    if resized.is_larger:
        yield "Begin with the largest"
