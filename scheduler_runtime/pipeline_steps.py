"""Make the ranks of a pipeline begin each step together, or not at all.

    schedule = steps_together(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss))
    schedule.step(batch)

If a rank fails in `torch.distributed.pipelining`, the others wait for what it would have sent,
until the group's timeout. So mistakes that can be seen before a step are looked for before it, and
reported on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from graphs.model_calls import input_forms
from graphs.pipeline import Pipeline, pipeline_of
from scheduler_runtime.applying import AppliedForward, PlanMismatchError
from scheduler_runtime.planned import Ranks, difference

ScheduleT = TypeVar("ScheduleT")


def steps_together(schedule: ScheduleT, *, group: dist.ProcessGroup | None = None) -> ScheduleT:
    """Make each `schedule.step` begin only if all ranks can run it; returns the schedule.

    Before the first step, each rank compares what it is about to run with the plans of its stages:
    the schedule, the stages, the number of micro-batches, and in the first stage their shapes.
    Before later steps, it compares the inputs or targets with those of the first step. Steps
    without a backward pass (`schedule.eval`) run without a plan, and are not compared. Each step
    costs one exchange through the group's store, in which ranks wait for each other for up to ten
    minutes.

    schedule: a schedule of `torch.distributed.pipelining`, whose stages have plans (`apply`).
    group: the ranks of the pipeline (None: the group of the stages).

    `step` then raises PlanMismatchError on a rank that differs from its plan or its first step, and
    RanksDisagreeError on all other ranks; if ranks differ from each other, RanksDisagreeError on
    all. After an error in the middle of a step, the other ranks still wait.
    """
    stepping: Any = schedule
    stages = list(getattr(stepping, "_stages", None) or [stepping._stage])
    of_stages = group or stages[0].group or dist.group.WORLD
    assert of_stages is not None  # there are stages only in a group
    ranks = Ranks(of_stages)
    own_step = stepping.step
    first_split: dict[str, list[str]] = {}

    @functools.wraps(own_step)
    def step(*args: Any, target: Any = None, **options: Any) -> Any:
        named = {n: v for n, v in options.items() if n not in _OF_STEP}
        trains = bool(stepping._has_backward and torch.is_grad_enabled())
        split = {"inputs": _forms((args, named)), "targets": _forms(target)}
        with ranks.sending_errors():
            if trains and not first_split:
                _check_places(stepping, stages)
                _check_micro_batches(stepping, stages, args, named)
            elif trains:
                _check_same_forms(first_split, split)
        name, n = type(stepping).__name__, _n_micro_batches(stepping)
        ranks.agree({"the schedule": name, "micro-batches": n, "training": trains})
        if trains:
            first_split.update(split)
        return own_step(*args, target=target, **options)

    stepping.step = step
    return schedule


_OF_STEP = ("losses", "return_outputs", "loss_kwargs")
"""Options of `step` that are not passed on to the first stage."""


def _n_micro_batches(schedule: Any) -> int:
    return int(schedule._n_microbatches)


def _forms(values: Any) -> list[str]:
    return input_forms([leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)])


def _planned_forward(stage: Any) -> AppliedForward | None:
    forward = stage.submod.forward
    return forward if isinstance(forward, AppliedForward) else None


def _check_places(schedule: Any, stages: Sequence[Any]) -> None:
    """Raise PlanMismatchError if a stage's plan is for another place in a pipeline than it runs."""
    from torch.distributed import pipelining  # here: it is slow to import

    kinds: dict[type, str] = {
        pipelining.Schedule1F1B: "1f1b",
        pipelining.ScheduleGPipe: "gpipe",
        pipelining.ScheduleInterleaved1F1B: "interleaved",
    }
    for stage in stages:
        forward = _planned_forward(stage)
        place = None if forward is None else pipeline_of(forward.plan.environment)
        if place is None:
            continue
        name, kind = type(schedule).__name__, kinds.get(type(schedule))
        if kind is None:
            known = ", ".join(each.__name__ for each in kinds)
            raise PlanMismatchError(f"plans of stages are for {known}; the schedule is {name}")
        here = Pipeline(
            stage.stage_index, stage.num_stages, _n_micro_batches(schedule), kind, len(stages)
        )
        if here != place:
            raise PlanMismatchError(
                f"{name} runs {here.words}, and the plan is of {place.words}: plan for what runs"
            )


def _check_micro_batches(schedule: Any, stages: Sequence[Any], args: Any, kwargs: Any) -> None:
    """Raise PlanMismatchError if the first stage has no plan for one of the micro-batches."""
    forward = _planned_forward(stages[0])
    if forward is None or not stages[0].is_first:
        return
    for each in zip(*schedule._split_inputs(args, kwargs), strict=True):
        call, model = forward.call_of(*each), stages[0].submod
        found = [difference(plan, call, model) for plan in forward.plans]
        reasons = [reason for reason in found if reason is not None]
        if len(reasons) == len(found) and not forward.may_replan(reasons[0]):
            raise PlanMismatchError(
                f"a micro-batch differs from the planned one: {reasons[0]}; give each step a batch "
                f"of {_n_micro_batches(schedule)} micro-batches of the planned shape, or plan again"
            )


def _check_same_forms(first: dict[str, list[str]], now: dict[str, list[str]]) -> None:
    for what, forms in now.items():
        if forms != first[what]:
            raise PlanMismatchError(
                f"{what} of this step: {', '.join(forms) or 'none'}; of the first step: "
                f"{', '.join(first[what]) or 'none'}. The stages exchange tensors of one shape: "
                "pad the batch, or drop the last one (drop_last=True)"
            )
