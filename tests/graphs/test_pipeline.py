"""Stages of a pipeline: micro-batches in flight against torch's schedules, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B as Interleaved

from graphs import Pipeline, PipelineError
from graphs.fsdp import Sharding, ShardingError
from graphs.graph import Graph
from graphs.pipeline import pipeline_of
from graphs.trace import trace
from solver import Solution, report, solve

WIDTH = 16


def stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to("meta")


def batch(*, requires_grad: bool) -> torch.Tensor:
    return torch.empty(8, WIDTH, device="meta", requires_grad=requires_grad)


def most_in_flight(actions: Iterable[Any]) -> int:
    """Of torch's actions of one rank: forwards whose backward has not ended, at most."""
    now = most = 0
    for action in actions:
        if action is not None and action.computation_type.name in ("FORWARD", "FULL_BACKWARD"):
            now += 1 if action.computation_type.name == "FORWARD" else -1
            most = max(most, now)
    assert now == 0
    return most


def passes_of(actions: Iterable[Any], n_ranks: int, n_local: int) -> set[Any]:
    """Of torch's actions of one rank: `Pipeline.passes`."""
    now, found = [0] * n_local, set()
    for action in actions:
        if action is None or action.computation_type.name not in ("FORWARD", "FULL_BACKWARD"):
            continue
        local = action.stage_index // n_ranks
        now[local] -= action.computation_type.name == "FULL_BACKWARD"
        found.add((local, tuple(now)))
        now[local] += action.computation_type.name == "FORWARD"
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_in_flight_are_those_of_the_schedules_of_torch(schedule: str) -> None:
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    for n_stages in range(1, 7):
        for n_microbatches in range(n_stages, 14):
            torchs = object.__new__(kind)
            torchs._num_stages, torchs._n_microbatches = n_stages, n_microbatches
            order = torchs._get_pipeline_order()
            assert order is not None
            for i in range(n_stages):
                pipeline = Pipeline(i, n_stages, n_microbatches, schedule)
                assert pipeline.n_in_flight == most_in_flight(order[i])
                assert pipeline.passes == passes_of(order[i], n_stages, 1)


def test_interleaved_micro_batches_in_flight_are_those_of_the_schedule_of_torch() -> None:
    n_tried = 0
    for n_ranks in range(1, 6):
        for n_microbatches in range(1, 14):
            torchs = object.__new__(Interleaved)
            torchs.pp_group_size, torchs._n_microbatches = n_ranks, n_microbatches
            n_rounds = max(1, n_microbatches // n_ranks)
            torchs.microbatches_per_round = n_microbatches // n_rounds
            for n_local in range(1, 4):
                torchs.n_local_stages = n_local
                options = (n_ranks * n_local, n_microbatches, "interleaved", n_local)
                if n_microbatches % n_rounds:
                    with pytest.raises(PipelineError, match="rounds"):
                        Pipeline(0, *options)
                    continue
                for i in range(n_ranks * n_local):
                    order = torchs._calculate_single_rank_operations(i % n_ranks)
                    place = Pipeline(i, *options)
                    assert place.n_in_flight == most_in_flight(order)
                    assert place.passes == passes_of(order, n_ranks, n_local)
                    n_tried += 1
    assert n_tried > 500


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_microbatches": 0}, "n_microbatches is 0; expected a whole number of at least 1"),
        ({"n_microbatches": 2.0}, "n_microbatches is 2.0"),
        ({"n_stages": 0}, "n_stages is 0"),
        ({"stage": 4}, "stage is 4 of 4 stages; give 0 to 3"),
        ({"stage": -1}, "stage is -1"),
        ({"schedule": "zb"}, "schedule is 'zb'; one of 1f1b, gpipe, interleaved"),
        ({"stages_per_rank": 2}, "only schedule='interleaved'"),
        (
            {"schedule": "interleaved", "stages_per_rank": 3},
            "4 stages cannot be divided into 3 per rank",
        ),
    ],
)
def test_what_is_no_place_in_a_pipeline_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        Pipeline(**({"stage": 0, "n_stages": 4, "n_microbatches": 8} | fields))


def test_what_torchs_schedule_does_not_run_is_not_planned() -> None:
    """Files of such plans are still read."""
    words = "at least as many micro-batches as stages: give 4 or more, or schedule='gpipe'"
    with pytest.raises(PipelineError, match=words):
        trace(stage(), batch(requires_grad=False), pipeline=Pipeline(0, 4, 3))
    Pipeline(0, 4, 3, "gpipe").check_runs()


def test_what_is_no_stage_is_refused() -> None:
    middle, last = Pipeline(1, 4, 8), Pipeline(3, 4, 8)
    x = batch(requires_grad=True)
    with pytest.raises(PipelineError, match="need gradients"):
        trace(stage(), batch(requires_grad=False), pipeline=middle)
    with pytest.raises(PipelineError, match="only the last stage has a loss"):
        trace(stage(), x, loss=lambda output, _: output.sum(), pipeline=middle)
    with pytest.raises(PipelineError, match="GELU has no parameters"):
        trace(nn.GELU(), x, pipeline=middle)
    with pytest.raises(ShardingError, match="give reshard_after_forward=False"):
        trace(stage(), x, pipeline=middle, fsdp=Sharding(2))
    with pytest.raises(ShardingError, match="use '1f1b' or 'gpipe'"):
        trace(stage(), x, pipeline=Pipeline(1, 4, 4, "interleaved", 2), fsdp=2)
    with pytest.raises(ValueError, match="returns no tensor that requires a gradient"):
        trace(stage().requires_grad_(False), batch(requires_grad=False), pipeline=Pipeline(0, 4, 8))
    with pytest.raises(ValueError, match="not planned for a step with 3 micro-batches"):
        solve(stage(), x, budget="1GB", pipeline=middle, host_budget="1GB", host_link="1GB/s")
    assert trace(stage(), x, loss=lambda output, _: output.sum(), pipeline=last).n_in_flight == 1


def resident_bytes(graph: Graph) -> dict[str, int]:
    found = {t.name: t.size_bytes for t in graph.resident if t.name.startswith("pipeline.")}
    return {name.removeprefix("pipeline."): size_bytes for name, size_bytes in found.items()}


@pytest.mark.slow
def test_what_stands_beside_the_step() -> None:
    one_bytes = 8 * WIDTH * 4
    first = trace(stage(), batch(requires_grad=False), pipeline=Pipeline(0, 4, 8))
    buffers = {"inputs": 7 * one_bytes, "output_gradients": 7 * one_bytes}
    assert resident_bytes(first) == {**buffers, "sent_outputs": one_bytes}
    x = batch(requires_grad=True)
    middle = trace(stage(), x, pipeline=Pipeline(1, 4, 8))
    sent = {"sent_outputs": one_bytes, "sent_gradients": one_bytes}
    assert resident_bytes(middle) == {**buffers, **sent}
    gpipe = trace(stage(), x, pipeline=Pipeline(1, 4, 8, "gpipe"))
    assert resident_bytes(gpipe) == buffers
    assert gpipe.others_bytes == 2 * one_bytes  # once run: output, and gradient of the input
    last = trace(stage(), x, loss=lambda output, _: output.sum(), pipeline=Pipeline(3, 4, 8))
    assert resident_bytes(last) == {
        "inputs": 7 * one_bytes, "losses": 7 * 4, "sent_gradients": one_bytes
    }  # fmt: skip

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)  # saves what log_softmax makes, as large as logits

    target = torch.zeros(8, dtype=torch.long, device="meta")
    options = {"inputs": lambda pair: pair[0], "loss": lambda output, pair: loss(output, pair[1])}
    for schedule, n_others in (("1f1b", 0), ("gpipe", 7)):
        last = trace(stage(), (x, target), pipeline=Pipeline(3, 4, 8, schedule), **options)
        found = resident_bytes(last).get("saved_by_loss", 0)
        assert n_others * one_bytes <= found <= n_others * (one_bytes + 8), (schedule, found)
    interleaved = Pipeline(1, 4, 8, "interleaved", 2)
    found = resident_bytes(trace(stage(), x, pipeline=interleaved, optimizer=torch.optim.Adam))
    state_bytes = 2 * (WIDTH + 1) * WIDTH * 4
    assert found["other_stages.parameter"] == found["other_stages.gradient"] == state_bytes
    assert found["inputs"] == 15 * one_bytes
    assert found["sent_outputs"] == (16 - interleaved.n_in_flight) * one_bytes


def test_gradients_of_inputs_do_not_add_up_over_micro_batches() -> None:
    graph = trace(stage(), batch(requires_grad=True), pipeline=Pipeline(1, 4, 8))
    accumulated = [t for t in graph.resident if t.name.endswith(".accumulated")]
    assert len(accumulated) == 4  # two weights and two biases
    (gradient,) = (n for n in graph.outputs if graph.tensor_by_name[n].kind == "gradient")
    assert graph.tensor_by_name[gradient].size_bytes == 8 * WIDTH * 4


@pytest.mark.slow
def test_under_gpipe_gradients_are_there_from_the_first_backward_pass_on() -> None:
    x, place = batch(requires_grad=True), Pipeline(1, 4, 8, "gpipe")
    found = trace(stage(), x, pipeline=place)
    assert found.in_turn
    assert len(found.accumulated) == 4  # two weights and two biases
    existing = trace(stage(), x, pipeline=place, gradients="accumulate")
    sharded = trace(stage(), x, pipeline=place, gradients="accumulate", fsdp=2)
    alone = trace(stage(), x, pipeline=Pipeline(1, 4, 1, "gpipe"))
    for graph in (existing, sharded, alone):
        assert not graph.in_turn
        assert not graph.others_bytes
        assert not graph.accumulated
    one_bytes = 8 * WIDTH * 4
    assert resident_bytes(existing)["sent_gradients"] == 7 * one_bytes


def test_the_report_and_the_files_say_it(tmp_path, capsys) -> None:
    pipeline = Pipeline(1, 4, 8)
    solution = solve(stage(), batch(requires_grad=True), budget="1GB", pipeline=pipeline)
    assert pipeline_of(solution.environment) == pipeline
    assert pipeline.words in repr(solution)
    report(solution)
    printed = " ".join(capsys.readouterr().out.split())
    assert "pipeline stage 1 of 4, 1f1b, 8 micro-batches; 3 micro-batches in flight" in printed
    assert "for backward per micro-batch in flight" in printed
    assert "others in flight" in printed
    solution.save(tmp_path / "schedule.json")
    solution.graph.save(tmp_path / "graph.json")
    loaded = Solution.load(tmp_path / "schedule.json", graph=tmp_path / "graph.json")
    assert loaded.simulation == solution.simulation
    environment = {**solution.environment, "pipeline": {"stage": 1}}
    with pytest.raises(PipelineError, match="fields of Pipeline"):
        pipeline_of(environment)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipeline.stage = 2


def test_what_stands_beside_a_stage_has_the_dtype_of_its_outputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    solution = solve(
        stage(),
        batch(requires_grad=True),
        budget="1GB",
        pipeline=Pipeline(1, 4, 8),
        rewrites="none",
    )
    report(solution)
    shown = capsys.readouterr().out
    assert "others in flight" in shown
    assert "unknown" not in shown
