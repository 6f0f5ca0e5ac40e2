"""A budget of what PyTorch's allocator takes from the card."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checkpoint_solver.cli import main
from graphs.graph import Graph
from solver import Solution, solve
from solver.schedule import Request, least_capacity_bytes, reserved
from solver.solving import answer
from tests.support.command import failed, json_of
from tests.support.paths import GPT2
from tests.support.small_graphs import make, op

MIB = 2**20


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5_200_000_000, 4_000_000_000, 3_200_000_000])
@pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
def test_what_is_reserved_for_the_plan_fits(
    budget: int, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    graph = Graph.load(GPT2)
    of_tensors = solve(graph, budget=budget)
    found = solve(graph, budget=budget, budget_of="reserved")
    first = reserved(graph, of_tensors.schedule, capacity_bytes=budget)
    assert not first.settled  # or it would show nothing
    assert reserved(graph, found.schedule, capacity_bytes=budget).settled
    assert found.lower_bound_s == of_tensors.lower_bound_s  # that of all plans that fit
    assert found.simulation.time_s >= found.lower_bound_s
    assert (
        found.overhead < of_tensors.overhead + 0.05
    )  # a little less to plan with, not another plan

    assert found.request.reserve_bytes == 0  # as asked
    again = answer(graph, found.request)
    assert again.schedule == found.schedule

    found.save(tmp_path / "schedule.json")
    loaded = Solution.load(tmp_path / "schedule.json", graph=graph)
    assert loaded.request == found.request
    assert loaded.request.budget_of == "reserved"


def test_expandable_segments_leave_more_for_tensors(monkeypatch: pytest.MonkeyPatch):
    graph = Graph.load(GPT2)
    default = solve(graph, budget=4_000_000_000, budget_of="reserved")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    expandable = solve(graph, budget=4_000_000_000, budget_of="reserved")
    assert expandable.overhead <= default.overhead
    assert expandable.simulation.peak_bytes > default.simulation.peak_bytes


def test_whole_segments_may_leave_no_room():
    """Three tensors of 11 MiB take 36 MiB."""
    nodes = [op("f", "p", "a"), op("g", "p", "b"), op("h", "a b", "c")]
    graph = make(nodes, {"p": 512, "a": 11 * MIB, "b": 11 * MIB, "c": 11 * MIB}, outputs="c")
    assert solve(graph, budget=34 * MIB).schedule is not None
    found = solve(graph, budget=34 * MIB, budget_of="reserved")
    assert found.schedule is None
    assert found.status == "infeasible"
    assert not found.proven_infeasible
    assert found.minimum_budget_bytes == 38 * MIB  # 2 for the parameter
    assert solve(graph, budget=40 * MIB, budget_of="reserved").schedule is not None


def test_the_least_capacity_settles_and_a_little_less_does_not():
    graph = Graph.load(GPT2)
    found = solve(graph, budget=4_000_000_000)
    least_bytes = least_capacity_bytes(graph, found.schedule)
    assert reserved(graph, found.schedule, capacity_bytes=least_bytes).settled
    assert not reserved(graph, found.schedule, capacity_bytes=int(0.998 * least_bytes)).settled
    free = reserved(graph, found.schedule)
    assert free.allocated_bytes <= least_bytes <= free.reserved_bytes


@pytest.mark.slow
def test_the_rounding_that_a_graph_counts_is_no_part_of_the_bound():
    """Tiny tensors fit, rounded as they come and go; rounding counted as of thousands would not."""
    n = 500
    nodes = [op(f"n{i}", f"t{i}", f"t{i + 1}") for i in range(n)]
    sizes = {f"t{i}": 8 for i in range(n + 1)}
    rounding = 10 * (n + 1) * 504
    graph = make(nodes, {**sizes, "allocator_rounding": rounding}, outputs=f"t{n}")
    schedule = solve(graph, budget=rounding + MIB).schedule
    assert reserved(graph, schedule, capacity_bytes=2 * MIB).settled
    assert solve(graph, budget=2 * MIB).proven_infeasible  # of what is allocated, as counted
    found = solve(graph, budget=2 * MIB, budget_of="reserved")
    assert found.lower_bound_s < float("inf")
    assert not found.proven_infeasible


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="budget_of is 'cached'; one of allocated, reserved"):
        Request(10, budget_of="cached")


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]):
    arguments = [str(GPT2), "--budget", "4GB", "--budget-of", "reserved"]
    assert json_of(capsys, *arguments)["budget_of"] == "reserved"
    assert main(arguments) == 0
    assert "4.00 GB (3.73 GiB), of reserved memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--budget-of", "reserved"], "a budget of reserved memory"),
        (["--host", "8GB", "--host-link", "50GB/s"], "copies to the host"),
    ],
)
def test_stages_with_several_micro_batches_in_flight_are_refused(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    graph = dataclasses.replace(Graph.load(GPT2), n_in_flight=4)
    graph.save(tmp_path / "stage.json")
    message = failed(capsys, str(tmp_path / "stage.json"), "--budget", "8GB", *words, code=2)
    assert f"{what}: not planned for a step with 4 micro-batches or passes in flight" in message


def test_the_cpu_has_no_such_allocator(capsys: pytest.CaptureFixture[str]):
    arguments = [str(GPT2), "--budget", "4GB", "--budget-of", "reserved", "--device", "cpu"]
    assert "name a card (--device h100" in failed(capsys, *arguments, code=2)
