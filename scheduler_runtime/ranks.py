"""Check that all ranks have plans that fit together; otherwise all of them stop.

    solution = on_all_ranks(lambda: solve(stage, micro_batch, ..., pipeline=pipeline))

If one rank raises an error and the others go on, they wait for it in their next collective. If the
plans of ranks are for different steps, the ranks wait for each other or mix up what they exchange.
So each rank learns here what plans the others have, before anything else is exchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from graphs.fsdp import sharding_of
from graphs.pipeline import pipeline_of
from scheduler_runtime.execute import exports_in
from scheduler_runtime.planned import RanksDisagreeError
from solver.schedule import Solution


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others about its plan.

    failure: why it has no plan ("": it has one).
    agreed: what must be the same on all ranks.
    stage, n_ranks: the rank's stage of a pipeline (None: there is no pipeline), and the pipeline's
        number of ranks.
    """

    failure: str = ""
    agreed: dict[str, Any] = field(default_factory=dict)
    stage: int | None = None
    n_ranks: int = 1

    @classmethod
    def of(cls, solution: Solution, model: nn.Module | None) -> _Report:
        if solution.schedule is None:
            return cls(failure=f"nothing fits: {solution}")
        place, sharding = pipeline_of(solution.environment), sharding_of(solution.environment)
        fields = {} if place is None else dataclasses.asdict(place)
        shards = {} if sharding is None else dataclasses.asdict(sharding)
        if place is not None and model is None:  # each rank has its own stage and its own groups
            shards.pop("groups", None)
            agreed = {**fields, **shards}
            return cls(agreed=agreed, stage=agreed.pop("stage"), n_ranks=place.n_ranks)
        return cls(
            agreed={
                **fields,
                **shards,
                "step": solution.graph.graph_id[:19],
                "schedule": _digest(solution.schedule.ops_to_json()),
                **({} if model is None else {"exported plan": _digest(exports_in(model))}),
            }
        )


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]


def on_all_ranks(
    plan: Callable[[], Solution],
    *,
    group: dist.ProcessGroup | None = None,
    model: nn.Module | None = None,
) -> Solution:
    """Call `plan` and return its solution, once all ranks of the group have a plan.

    plan: calls `solve` or `Solution.load`, for example. Each rank of a pipeline plans its own stage
        (with several stages per rank, call this function once for each); the ranks of a sharded or
        replicated step all make the same plan.
    group: the ranks that train together (None: all): those of the pipeline, or of the mesh.
    model: the module that the plan is for. Give it if all ranks of the group run the same step (it
        may be one stage of a pipeline). A plan that was exported to it must then be exported to the
        same modules on all ranks.

    Raises what `plan` raises, and then RanksDisagreeError on all other ranks. Raises
    RanksDisagreeError on all ranks if nothing fits on one of them, or if the plans are not of one
    pipeline or not the same. A rank that does not call this is waited for until the group's
    timeout.
    """
    solution, error = None, None
    try:
        solution = plan()
        report = _Report.of(solution, model)
    except Exception as raised:  # noqa: BLE001  (raised below, when the other ranks know)
        error, report = raised, _Report(failure=f"{type(raised).__name__}: {raised}")
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    if error is not None:
        raise error
    if reason := _disagreement(reports):
        raise RanksDisagreeError(reason)
    assert solution is not None
    return solution


def _disagreement(reports: Sequence[_Report]) -> str:
    """Why the ranks' plans do not fit together; "": they do."""
    failed = [(rank, report.failure) for rank, report in enumerate(reports) if report.failure]
    if failed:
        return "; ".join(f"rank {rank} has no plan: {failure}" for rank, failure in failed)
    first = reports[0]
    for rank, report in enumerate(reports):
        for name in {**first.agreed, **report.agreed}:
            here, there = first.agreed.get(name), report.agreed.get(name)
            if here != there:
                limit = " (a search that its time limit ends can find another one on each rank)"
                return (
                    f"the plans of ranks 0 and {rank} differ in {name}: {here} and {there}"
                    f"{limit if name == 'schedule' else ''}; give all ranks the same options, or "
                    "plan on one and send the others the answer"
                )
    stages = [report.stage for report in reports]
    if first.stage is None:
        return ""
    on_rank = [None if stage is None else stage % first.n_ranks for stage in stages]
    if on_rank != list(range(first.n_ranks)):
        return (
            f"ranks 0 to {len(stages) - 1} have planned the stages "
            f"{', '.join(map(str, stages))}; the pipeline has {first.n_ranks} ranks, and rank i "
            "has stage i: give the group of one pipeline"
        )
    return ""
