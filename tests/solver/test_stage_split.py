"""`split_pipeline` against plans of all divisions, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import Pipeline, PipelineError
from graphs.costs import default_costs
from graphs.model_calls import Call, as_call
from graphs.pipeline import pipeline_of
from graphs.trace import read_layers, trace_module
from graphs.training_step import FRESH, indices_with_gradient
from scheduler_runtime import apply
from solver import PipelineSplit, Solution, solve, split_pipeline
from solver.plan_analysis import micro_batch_s, planned_stages
from solver.solving import as_step

WIDTH, ROWS = 8, 64
CPU = torch.device("cpu")


def layers() -> list[nn.Module]:
    """Unequal ones: of two widths, one without parameters, and a head."""
    torch.manual_seed(0)
    return [
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.Sequential(nn.Softplus(), nn.Linear(4 * WIDTH, WIDTH)),
    ]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.exp(), target)


MICRO_BATCH = torch.empty(ROWS, WIDTH, device="meta")
OPTIONS: dict[str, Any] = {"optimizer": "AdamW"}


def split(
    model: Sequence[nn.Module], n_stages: int | Sequence[int], **options: Any
) -> PipelineSplit:
    return split_pipeline(
        model,
        MICRO_BATCH,
        target=MICRO_BATCH,
        loss=loss_of,
        **({"n_stages": n_stages, "n_microbatches": 4, **OPTIONS} | options),
    )


def solved(model: Sequence[nn.Module], place: Pipeline, *, budget: int) -> Solution:
    """One stage by `solve`; the first layer of each is a Linear or gets what one returns."""
    x = MICRO_BATCH
    if not place.is_first:
        width = 4 * WIDTH
        x = torch.empty(ROWS, width, device="meta", requires_grad=True)
    stage = nn.Sequential(*model)
    if not place.is_last:
        return solve(stage, x, budget=budget, pipeline=place, **OPTIONS)
    return solve(
        stage,
        (x, MICRO_BATCH),
        inputs=lambda pair: pair[0],
        loss=lambda output, pair: loss_of(output, pair[1]),
        budget=budget,
        pipeline=place,
        **OPTIONS,
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("n_stages", [2, 3])
def test_the_split_is_the_best_of_all_divisions(n_stages: int) -> None:
    model = layers()
    plain = solved(model, Pipeline(0, 1, 1), budget=10**9)
    n_fitting = 0
    for share in (2.0, 1.6, 1.2):
        budget = int(share * plain.baseline.peak_bytes)
        slowest = []
        for cuts in itertools.combinations(range(1, len(model)), n_stages - 1):
            ends = (0, *cuts, len(model))
            parts = [model[a:b] for a, b in itertools.pairwise(ends)]
            if not all(any(True for each in part for _ in each.parameters()) for part in parts):
                continue
            plans = [
                solved(part, Pipeline(i, n_stages, 4), budget=budget)
                for i, part in enumerate(parts)
            ]
            times = [micro_batch_s(plan) for plan in plans]
            slowest.append(math.inf if None in times else max(t for t in times if t is not None))
        found = split(model, n_stages, budget=budget)
        if math.isinf(min(slowest)):
            assert not found.fits
            continue
        n_fitting += 1
        assert found.slowest_s == pytest.approx(min(slowest), rel=1e-12)
        assert found.lower_bound_s <= found.slowest_s * (1 + 1e-12)
        assert found.gap == pytest.approx(0.0, abs=1e-3)
    assert n_fitting >= 2


def test_each_stage_has_its_plan_and_runs(capsys) -> None:
    model = layers()
    found = split(model, 2, budget="1MB")
    assert sum(found.sizes) == len(model)
    assert f"{'+'.join(map(str, found.sizes))} layers" in repr(found)
    assert found.n_divisions == 4
    assert found.slowest_s <= found.equal_slowest_s
    values = torch.randn(ROWS, WIDTH)
    expected = nn.Sequential(*model)(values)
    for stage, (part, solution) in enumerate(zip(found.slices, found.solutions, strict=True)):
        place = pipeline_of(solution.environment)
        assert place == Pipeline(stage, 2, 4)
        module = nn.Sequential(*model[part])
        apply(module, solution)
        values = module(values if stage == 0 else values.detach().requires_grad_())
    assert torch.equal(values, expected)


@pytest.mark.slow
def test_equal_stages_are_planned_once() -> None:
    model = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    found = split(model, 3, schedule="gpipe", budget="1MB")
    assert found.sizes == (2, 2, 2)
    assert found.n_plans == 3  # the first, the last, and one between
    four = split(model[:4], 4, schedule="gpipe", budget="1MB")
    assert four.n_plans == 3
    places = [pipeline_of(solution.environment) for solution in four.solutions]
    assert places == [Pipeline(i, 4, 4, "gpipe") for i in range(4)]
    assert four.solutions[1].schedule == four.solutions[2].schedule


@pytest.mark.slow
def test_layers_are_traced_once_for_all_places(monkeypatch) -> None:
    traced: list[Pipeline] = []

    def counted(module: Any, batch: Any, options: Any, **others: Any) -> Any:
        traced.append(options["pipeline"])
        return as_step(module, batch, options, **others)

    monkeypatch.setattr(planned_stages, "as_step", counted)
    wide = 4 * WIDTH
    blocks = [nn.Sequential(nn.Linear(wide, wide), nn.GELU()) for _ in range(3)]
    model = [nn.Linear(WIDTH, wide), *blocks, nn.Linear(wide, WIDTH)]
    told: list[str] = []
    found = split(model, 5, budget="1MB", n_microbatches=5, on_stage=told.append)
    assert found.n_plans == len(told) == 5  # each with another number of micro-batches in flight
    assert [place.n_in_flight for place in map(place_of, found.solutions)] == [5, 4, 3, 2, 1]
    assert len(traced) == 3  # the first, the last, and one between
    assert "planning stage 3 of 5 with 1 layer..." in told
    for layer, solution in zip(model, found.solutions, strict=True):
        alone = solved([layer], place_of(solution), budget=10**6)
        assert solution.graph.graph_id == alone.graph.graph_id


def place_of(solution: Solution) -> Pipeline:
    place = pipeline_of(solution.environment)
    assert place is not None
    return place


@pytest.mark.slow
def test_where_nothing_fits_the_equal_division_says_why() -> None:
    found = split(layers(), 2, budget="20kB")
    assert not found.fits
    assert found.slowest_s is found.gap is None
    assert found.lower_bound_s == math.inf
    assert "nothing fits (proven)" in repr(found)
    assert found.sizes == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_of_several_numbers_of_stages_the_fewest_that_fit(n_stages: int) -> None:
    """Four layers of mostly parameters: 67 kB each with gradients and what AdamW keeps."""
    model = [nn.Linear(64, 64) for _ in range(4)]
    options: dict[str, Any] = {"budget": {1: 500_000, 2: 230_000, 4: 130_000}[n_stages], **OPTIONS}
    x = torch.empty(2, 64, device="meta")

    def divided(numbers: int | Sequence[int]) -> PipelineSplit:
        return split_pipeline(
            model, x, target=x, loss=loss_of, n_stages=numbers, n_microbatches=4, **options
        )

    found = divided(range(1, 6))
    assert found.fits
    assert len(found.sizes) == n_stages
    assert [len(each.sizes) for each in found.before] == list(range(1, n_stages))
    assert not any(each.fits for each in found.before)
    assert found.sizes == divided(n_stages).sizes


def test_1f1b_is_divided_into_no_more_stages_than_micro_batches() -> None:
    none = split(layers(), [4, 3, 2], budget="20kB", n_microbatches=2)
    assert (none.fits, len(none.sizes)) == (False, 2)
    with pytest.raises(PipelineError, match="n_microbatches is 2; Schedule1F1B runs at least"):
        split(layers(), [4, 3], budget="20kB", n_microbatches=2)


@pytest.mark.slow
def test_where_no_number_of_stages_fits_the_last_says_why() -> None:
    none = split(layers(), [3, 2], budget="20kB")
    assert not none.fits
    assert len(none.sizes) == 2
    assert [len(each.sizes) for each in none.before] == [3]
    with pytest.raises(PipelineError, match="5 layers cannot be divided into 6 stages; give"):
        split(layers(), [7, 6], budget="1MB", n_microbatches=8)


@pytest.mark.slow
def test_layers_that_share_a_parameter_stay_together() -> None:
    model = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model[1].weight = model[2].weight
    found = split(model, 2, budget="1MB")
    assert found.sizes in ((1, 3), (3, 1))
    model[3].weight = model[0].weight
    with pytest.raises(PipelineError, match="layers that share a parameter stay together"):
        split(model, 2, budget="1MB")


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused() -> None:
    model = layers()
    with pytest.raises(PipelineError, match="5 layers cannot be divided into 6 stages; give"):
        split(model, 6, budget="1MB", n_microbatches=8)
    with pytest.raises(PipelineError, match=r"layer with parameters \(there are 4\)"):
        split(model, 5, budget="1MB", n_microbatches=8)
    with pytest.raises(PipelineError, match="interleaved"):
        split(model, 2, budget="1MB", schedule="interleaved")
    with pytest.raises(TypeError, match="inputs"):
        split(model, 2, budget="1MB", inputs=lambda batch: batch)
    with pytest.raises(ValueError, match="budget"):
        split(model, 2, budget="1XB")
    model[0].requires_grad_(False)
    assert split(model, 2, budget="1MB").sizes[0] >= 3  # the first stage must train something


class _WithAside(nn.Module):
    """Returns, beside its output, what takes long and is not used by the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 512 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own(x), self.aside(x).tanh().sum()


class _FirstOnly(nn.Module):
    """Uses the first of two tensors. is_cut: without a gradient."""

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__()
        self.own, self.is_cut = nn.Linear(WIDTH, WIDTH), is_cut

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return self.own(x.detach() if self.is_cut else x)


class _InTurn(nn.ModuleList):
    def forward(self, *values: Any) -> Any:
        value: Any = values
        for layer in self:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "model",
    [
        lambda: [_WithAside(), _FirstOnly(), _FirstOnly()],
        lambda: [_FirstOnly(), nn.Linear(WIDTH, WIDTH), _FirstOnly(is_cut=True)],
    ],
)
def test_layers_take_no_longer_by_themselves_than_in_a_stage(model: Any) -> None:
    """What nothing reads is not run."""
    parts, costs = model(), default_costs(CPU)
    x = torch.empty(ROWS, WIDTH, device="meta")
    read = read_layers(parts, x, stage_of=_InTurn, device=CPU, costs=costs)
    for first, end in itertools.combinations(range(len(parts) + 1), 2):
        graph = trace_module(
            _InTurn(parts[first:end]),
            Call.of(*as_call(read[first].inputs)),
            device=CPU,
            choose=indices_with_gradient,
            gradients=FRESH,
            costs=costs,
        ).graph
        least_s = sum(layer.least_s for layer in read[first:end])
        assert least_s <= math.fsum(node.time_s for node in graph.nodes) * (1 + 1e-9)
