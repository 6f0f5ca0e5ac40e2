"""Divide a model's layers into pipeline stages, each planned within the same budget.

    split = split_pipeline(layers, x, target=y, loss=F.cross_entropy, budget="16GB",
                           n_stages=4, n_microbatches=8, optimizer=torch.optim.AdamW)
    split.sizes        # (3, 5, 5, 3): layers by stage
    split.solutions    # the plan of each

The slowest stage sets the pace of a pipeline, and how long a stage takes depends on what its plan
has to recompute. `solver.plan_analysis.divisions` finds the best division, and
`solver.plan_analysis.planned_stages` plans the stages for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from graphs.fsdp import Sharding, ShardingError
from graphs.pipeline import Pipeline, PipelineError
from graphs.rewrites import check_word
from solver.plan_analysis.divisions import best_division, equal_parts
from solver.plan_analysis.planned_stages import PlannedStages, micro_batch_s
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    check_names,
    counted,
    format_percent,
    format_size,
    format_time,
    telling,
)
from solver.solving import check_options

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graphs.trace import StageOf


_STAGE_SPECIFIC_OPTIONS = {"inputs", "pipeline"}
"""Options of `trace` that differ between stages, so `split_pipeline` does not take them."""


@dataclass(frozen=True)
class PipelineSplit:
    """A division of layers into pipeline stages, with the plan of each stage.

    sizes: the number of layers in each stage.
    solutions: the plan of each stage. If no division fits, those of the equal division, which say
        why.
    lower_bound_s: in no division, with any plans, is the slowest stage faster (inf: none fits).
    equal: the plans of the equal division, for comparison.
    n_divisions: how many divisions were compared.
    n_plans: how many stages were planned, including those of the equal division. All others are
        slower even without recomputation, or equal to one that was planned.
    before: results for the numbers of stages that were tried before this one; none fits.

    Seconds are those of the forward and backward pass of one micro-batch.
    """

    sizes: tuple[int, ...]
    solutions: tuple[Solution, ...]
    lower_bound_s: float
    equal: tuple[Solution, ...]
    n_divisions: int
    n_plans: int
    before: tuple[PipelineSplit, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether each stage has a plan."""
        return all(solution.simulation is not None for solution in self.solutions)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The layers of each stage, as slices of the list of layers."""
        ends = [sum(self.sizes[:i]) for i in range(len(self.sizes) + 1)]
        return tuple(slice(first, end) for first, end in pairwise(ends))

    @property
    def times_s(self) -> tuple[float | None, ...]:
        """Seconds of each stage (None: it has no plan)."""
        return tuple(map(micro_batch_s, self.solutions))

    @property
    def slowest_s(self) -> float | None:
        """Seconds of the slowest stage (None: nothing fits)."""
        return _slowest_s(self.solutions)

    @property
    def equal_slowest_s(self) -> float | None:
        """Seconds of the slowest stage of the equal division (None: it does not fit)."""
        return _slowest_s(self.equal)

    @property
    def gap(self) -> float | None:
        """How far the slowest stage is above the lower bound, as a share (None: nothing fits)."""
        if self.slowest_s is None:
            return None
        slower_s = self.slowest_s - self.lower_bound_s
        return max(0.0, slower_s / self.slowest_s) if self.slowest_s else 0.0

    def __repr__(self) -> str:
        """One line: the division found, the proven gap, and the equal division for comparison."""
        budget = format_size(self.solutions[0].request.budget_bytes)
        request_text = f"{len(self.sizes)} stages, budget {budget}"
        compared = f"of {counted(self.n_divisions, 'division')}, {counted(self.n_plans, 'plan')}"
        if self.slowest_s is None:
            proven = " (proven)" if math.isinf(self.lower_bound_s) else ""
            return f"PipelineSplit({request_text}: nothing fits{proven}, {compared})"
        equal_s = self.equal_slowest_s
        equal = "does not fit" if equal_s is None else format_time(equal_s)
        return (
            f"PipelineSplit({request_text}: {'+'.join(map(str, self.sizes))} layers, slowest stage "
            f"{format_time(self.slowest_s)}, proven within {format_percent(self.gap or 0.0)}; "
            f"equal division {equal}; {compared})"
        )


def split_pipeline(
    layers: Iterable[nn.Module],
    micro_batch: Any,
    *,
    n_stages: int | Sequence[int],
    n_microbatches: int,
    budget: int | float | str,
    schedule: str = "1f1b",
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    stage_of: StageOf | None = None,
    reserve: int | float | str | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    capacity_bytes: int | None = None,
    rewrites: str | None = None,
    on_stage: Callable[[str], None] | None = None,
    quick: bool = False,
    **trace_options: Any,
) -> PipelineSplit:
    """Divide layers into pipeline stages so that the slowest planned stage is as fast as possible.

    layers: the model's layers in order; the output of each is the input of the next. A stage is a
        run of consecutive layers with at least one parameter. Layers that share a parameter are put
        into the same stage.
    micro_batch: what the first layer is called with, as for `solve`; meta tensors are enough.
    n_stages: the number of stages. Several numbers, such as range(2, 9), are tried in turn up to
        the first that fits; under "1f1b" only those that are at most n_microbatches.
    n_microbatches, schedule: as for `Pipeline`; the schedule is "1f1b" or "gpipe".
    budget: bytes of each rank, as for `solve`.
    target, loss: the loss is loss(output of the last layer, target), as the schedules of
        `torch.distributed.pipelining` call it. Without `loss`, the last layer returns the loss.
    stage_of: makes the module of a stage from its layers (default: `nn.Sequential`).
    time_limit_s: for planning one stage.
    on_stage: called with a progress message before each stage is planned.
    quick: plan with a fraction of the work, to see what fits.

    All other options are as for `solve`: optimizer, device, costs, fsdp and so on. Give an
    optimizer as its class, its name or a function, since each stage has its own. A Sharding must
    have neither groups, whose names differ between stages, nor an mp_policy, since single layers
    are not traced in its dtypes.

    Equal layers are traced once, and planned once for each place in the pipeline. The bound of the
    division is proven: every other division has a stage that takes at least as long, by the bound
    of its plan or by its layers' operators alone.

    Raises ValueError for invalid options, PipelineError if the layers cannot be divided like this,
    ShardingError if a stage cannot be sharded like this, and TraceError for a layer that cannot be
    traced.
    """
    from graphs.trace import trace

    check_options(
        method=method, time_limit_s=time_limit_s, budget=budget, capacity_bytes=capacity_bytes
    )
    own_parameters, trace_parameters = (
        inspect.signature(f).parameters for f in (split_pipeline, trace)
    )
    check_names(
        "split_pipeline",
        trace_options,
        [*own_parameters, *(trace_parameters.keys() - _STAGE_SPECIFIC_OPTIONS)],
    )
    if schedule == "interleaved":
        raise PipelineError(
            "schedule='interleaved' puts several stages on one rank, whose plans share a budget: "
            "divide the layers yourself and solve for each stage, or use '1f1b' or 'gpipe'"
        )
    _check_sharding(trace_options.get("fsdp"))
    layers = list(layers)
    stage_counts = [n_stages] if isinstance(n_stages, int) else list(n_stages)
    places = [Pipeline(0, n, n_microbatches, schedule) for n in stage_counts]
    feasible_counts = _feasible_stage_counts(
        [place.n_stages for place in _runnable(places)], len(layers)
    )
    if rewrites is not None:
        trace_options["rewrites"] = check_word(rewrites)
    request = {
        "budget": budget,
        "reserve": reserve,
        "capacity_bytes": capacity_bytes,
        "rewrites": rewrites,
        "method": method,
        "time_limit_s": time_limit_s,
        "seed": seed,
    }
    with telling(f"tracing {counted(len(layers), 'layer')}...") as say:
        stages = PlannedStages(
            layers, micro_batch, places[0], stage_of, target, loss, trace_options, request, quick
        )
        return _fewest_stages_that_fit(stages, feasible_counts, on_stage or say)


def _check_sharding(fsdp: int | Sharding | None) -> None:
    """Raise ShardingError for options of a Sharding that `split_pipeline` does not support."""
    if not isinstance(fsdp, Sharding):
        return
    for name in ("groups", "mp_policy"):
        if getattr(fsdp, name) is not None:
            raise ShardingError(
                f"{name} of a Sharding: not planned where layers are divided into stages; leave it "
                "out, or solve(stage, ..., fsdp=..., pipeline=...) for each stage"
            )


def _runnable(places: Sequence[Pipeline]) -> list[Pipeline]:
    """The pipelines that PyTorch's schedule can run. Raises PipelineError if there are none."""
    runnable, errors = [], []
    for place in places:
        try:
            place.check_runs()
            runnable.append(place)
        except PipelineError as error:
            errors.append(error)
    if errors and not runnable:
        raise errors[0]
    return runnable


def _feasible_stage_counts(stage_counts: Sequence[int], n_layers: int) -> list[int]:
    """The numbers of stages that do not exceed the number of layers.

    Raises PipelineError if there are none.
    """
    found = [n for n in stage_counts if n <= n_layers]
    if not found:
        least = min(stage_counts, default=1)
        raise PipelineError(
            f"{counted(n_layers, 'layer')} cannot be divided into {least} stages; give the "
            "model's layers one by one"
        )
    return found


def _fewest_stages_that_fit(
    stages: PlannedStages, stage_counts: Sequence[int], say: Callable[[str], None]
) -> PipelineSplit:
    """The best division into the first number of stages for which one fits; if none fits, the
    result for the last number."""
    tried: list[PipelineSplit] = []
    impossible: PipelineError | None = None
    for n_stages in stage_counts:
        try:
            stages.divide_into(n_stages)
        except PipelineError as error:
            impossible = error
            continue
        split = _best_split(stages, n_stages, say)
        if split.fits:
            return dataclasses.replace(split, before=tuple(tried))
        tried.append(split)
    if not tried:
        assert impossible is not None
        raise impossible
    return dataclasses.replace(tried[-1], before=tuple(tried[:-1]))


def _best_split(stages: PlannedStages, n_stages: int, say: Callable[[str], None]) -> PipelineSplit:
    """The best division into this number of stages."""
    n_layers, n_before = stages.n_layers, stages.n_plans
    found = best_division(
        n_layers, n_stages, bound_s=stages.bound_s, plan=lambda part: stages.time(part, say)
    )
    equal = tuple(map(stages.solution, equal_parts(n_layers, n_stages)))
    parts = found.parts or equal_parts(n_layers, n_stages)
    return PipelineSplit(
        sizes=tuple(part.end - part.first for part in parts),
        solutions=tuple(map(stages.solution, parts)),
        lower_bound_s=found.lower_bound_s,
        equal=equal,
        n_divisions=math.comb(n_layers - 1, n_stages - 1),
        n_plans=stages.n_plans - n_before,
    )


def _slowest_s(solutions: Sequence[Solution]) -> float | None:
    """Seconds of the slowest stage (None: a stage has no plan)."""
    times = [micro_batch_s(solution) for solution in solutions]
    found = [time_s for time_s in times if time_s is not None]
    return max(found) if len(found) == len(times) else None
