"""`solve explain`: every sentence is checked against the schedule, or simulated again."""

from __future__ import annotations

import dataclasses

import pytest

import checkpoint_solver.cli.explain
from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.plan_analysis.explain import (
    most_recomputed,
    neighbours,
    peak,
    step_bytes_for,
    why_recomputed,
)
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.schedule.solution import Request, Solution
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import failed, json_of, without_progress
from tests.support.paths import GPT2
from tests.support.small_graphs import make, op, plan


def solution_from_text(graph: Graph, text: str, *, spare_bytes: int = 0) -> Solution:
    """A schedule in one line, as the answer for just the budget that it needs."""
    schedule = plan(graph, text)
    simulation = simulate(graph, schedule)
    return Solution(
        status="feasible",
        graph=graph,
        schedule=schedule,
        simulation=simulation,
        request=Request(budget_bytes=simulation.peak_bytes + spare_bytes),
        baseline=simulate(graph, baseline(graph)),
        lower_bound_s=0.0,
        method="none",
        solve_time_s=0.0,
    )


GRAPH = make(
    [
        op("f", "x", "a", time_s=1),
        op("g", "a", "b", time_s=2),
        op("h", "b", "c", time_s=4),
        op("bh", "c b", "gb", phase="backward", workspace_bytes=5000),
        op("bg", "gb b a", "ga", phase="backward"),
    ],
    {"x": 1, "a": 10, "b": 100, "c": 1000, "gb": 10, "ga": 1},
    outputs="ga",
)
TWICE = "f g -a h -b f g -a bh -c f bg -gb -b -a"


def test_why_an_op_runs_again_by_hand():
    found = why_recomputed(solution_from_text(GRAPH, TWICE), "f")
    assert (found.node.name, found.n_runs, found.output_bytes) == ("f", 3, 10)
    first, second = found.recomputations
    assert first.dropped_after.name == "g"
    assert [node.name for node in first.through] == ["g"]
    assert first.reader.name == "bh"
    assert second.dropped_after.name == "g"
    assert second.through == ()
    assert second.reader.name == "bg"
    assert found.last_reader.name == "bg"
    # Kept: f runs once, and is there while bh needs most: 10 bytes more at the peak.
    assert found.kept.peak_bytes == solution_from_text(GRAPH, TWICE).simulation.peak_bytes + 10
    assert found.kept.time_s == solution_from_text(GRAPH, TWICE).simulation.time_s - 2


def test_keeping_an_op_saves_what_ran_for_its_sake_alone():
    found = why_recomputed(solution_from_text(GRAPH, "f g -a h -b f g bh -c bg -gb -b -a"), "g")
    # Without the second g the second f still serves bg.
    assert (
        found.kept.time_s
        == solution_from_text(GRAPH, "f g -a h -b f g bh -c bg -gb -b -a").simulation.time_s - 2
    )
    only_for_g = make(
        [*GRAPH.nodes[:4], op("bg", "gb b", "ga", phase="backward")],
        {t.name: t.size_bytes for t in GRAPH.tensors},
        outputs="ga",
    )
    text = "f g -a h -b f g -a bh -c bg -gb -b"
    found = why_recomputed(solution_from_text(only_for_g, text), "g")
    assert found.kept.time_s == solution_from_text(only_for_g, text).simulation.time_s - 3
    assert found.kept.n_recomputed == 0


def test_an_op_that_runs_once():
    found = why_recomputed(solution_from_text(GRAPH, TWICE), "h")
    assert (found.n_runs, found.recomputations, found.kept) == (1, (), None)
    assert found.last_reader.name == "bh"
    with pytest.raises(KeyError):
        why_recomputed(solution_from_text(GRAPH, TWICE), "absent")


def test_a_run_that_serves_nothing_is_said_to():
    found = why_recomputed(solution_from_text(GRAPH, "f g h bh -c bg -gb -b -a f -a"), "f")
    assert [rerun.reader for rerun in found.recomputations] == [None]


def test_the_peak_by_hand():
    found = peak(solution_from_text(GRAPH, TWICE))
    assert found.node.name == "bh"
    assert (found.position, found.n_ops) == (6, 8)
    assert found.largest == (("c", 1000), ("b", 100), ("gb", 10))
    assert found.memory_bytes["workspace"] == 5000
    assert found.resident_bytes == 1
    assert (
        sum(found.memory_bytes.values()) == solution_from_text(GRAPH, TWICE).simulation.peak_bytes
    )


def test_what_runs_again_most_time_first():
    found = most_recomputed(solution_from_text(GRAPH, TWICE))
    assert [(node.name, n) for node, n in found] == [("f", 2), ("g", 1)]


@pytest.fixture(scope="module")
def planned() -> Solution:
    return solve(Graph.load(GPT2), budget="4GB", time_limit_s=600)


def test_every_op_that_runs_again_in_a_real_plan_has_a_reason(planned):
    for node, n in most_recomputed(planned):
        found = why_recomputed(planned, node.name)
        assert len(found.recomputations) == n
        assert all(
            r.reader is not None and r.reader.phase != "forward" for r in found.recomputations
        )
        assert found.kept.time_s < planned.simulation.time_s
        # It does not fit, or it would be kept; or what it would save is within the gap.
        saved_s = planned.simulation.time_s - found.kept.time_s
        gap_s = planned.simulation.time_s - planned.lower_bound_s
        assert found.kept.peak_bytes > planned.request.available_bytes or saved_s <= gap_s


def test_the_neighbours_are_on_either_side(planned):
    less, more = neighbours(planned, step_bytes=10**9, time_limit_s=600)
    assert less.request.budget_bytes == 3 * 10**9
    assert more.request.budget_bytes == 5 * 10**9
    assert less.overhead > planned.overhead > more.overhead
    assert less.lower_bound_s > planned.lower_bound_s > more.lower_bound_s


def test_more_is_never_worse_and_less_may_be_nothing():
    """`none` finds nothing below the baseline's peak; the plan that is there serves for more."""
    solution = solution_from_text(GRAPH, TWICE)
    less, more = neighbours(solution, step_bytes=1, time_limit_s=600)
    assert less.schedule is None
    assert more.schedule == solution.schedule
    less, more = neighbours(solution, step_bytes=10**5, time_limit_s=600)
    assert less is None
    assert more.simulation.time_s == more.baseline.time_s


def test_the_step_suits_the_graph(planned):
    above_bytes = planned.baseline.peak_bytes - planned.graph.resident_bytes
    assert step_bytes_for(planned) == above_bytes // 10 < 10**9
    assert (
        step_bytes_for(solution_from_text(GRAPH, TWICE)) == (baseline_peak_bytes(GRAPH) - 1) // 10
    )


# The command.


@pytest.fixture
def saved(planned, tmp_path) -> tuple[str, str]:
    planned.save(tmp_path / "schedule.json")
    planned.graph.save(tmp_path / "graph.json")
    return str(tmp_path / "schedule.json"), str(tmp_path / "graph.json")


def test_the_command_tells_it(saved, planned, capsys):
    name = most_recomputed(planned)[0][0].name
    assert main(["explain", *saved, "--op", name]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    text = " ".join(printed.out.split())
    found = why_recomputed(planned, name)
    for words in (
        "Peak peak op _log_softmax_backward_data",
        "Recomputed",
        f"Op {name}",
        f"computed {found.n_runs} times",
        f"recomputed for {found.recomputations[0].reader.name}",
        "above the budget; ",
        "this plan 4.00 GB: +6.63 %",
        "less costs",
        "more saves",
    ):
        assert words in text
    assert max(map(len, printed.out.splitlines())) <= 80


def test_the_command_as_json(saved, planned, capsys):
    name = most_recomputed(planned)[0][0].name
    value = json_of(capsys, "explain", *saved, "--op", name, "--step", "500MB")
    found = why_recomputed(planned, name)
    assert value["format"] == "explanation/1"
    assert value["op"]["kept"]["peak_bytes"] == found.kept.peak_bytes
    assert value["step_bytes"] == 500 * 10**6
    assert [b["budget_bytes"] for b in value["budgets"]] == [3500000000, 4000000000, 4500000000]
    assert value["peak"]["op"] == "_log_softmax_backward_data"
    assert len(value["again"]) == len(most_recomputed(planned))
    assert json_of(capsys, "explain", *saved, "--step", "500MB")["op"] is None


def test_ctrl_c_leaves_out_the_neighbours_alone(saved, capsys, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_solver.cli.explain, "neighbours", interrupted)
    assert main(["explain", *saved]) == 0
    text = capsys.readouterr().out
    assert "peak op" in text
    assert text.count("not planned") == 2


def test_a_budget_below_what_fits_is_out_of_reach(saved, capsys):
    assert main(["explain", *saved, "--step", "2GB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "less 2.00 GB: proven infeasible" in text
    assert "2.00 GB less is infeasible" in text


def test_what_the_command_refuses(saved, tmp_path, capsys):
    schedule, graph = saved
    residual(n_blocks=3).save(tmp_path / "other.json")
    other = str(tmp_path / "other.json")
    for argv, code, reason in (
        ([], 2, "see solve explain --help"),
        ([schedule], 2, "graph"),
        ([schedule, graph, "--op", "addmm_666"], 2, "did you mean addmm_6"),
        ([schedule, graph, "--op", "zzz"], 2, "--op zzz: no op of that name in the graph"),
        ([schedule, graph, "--step", "x"], 2, "invalid step 'x'"),
        ([schedule, graph, "--time-limit", "0"], 2, "invalid number of seconds"),
        ([graph, schedule], 4, "this is a schedule file; a graph file is expected"),
        ([schedule, other], 4, "made for another graph"),
        ([schedule, "absent.json"], 4, "absent.json: no such file"),
    ):
        assert reason in failed(capsys, "explain", *argv, code=code)


def test_help_names_the_subcommand(capsys):
    for argv, words in ((["--help"], "solve explain"), (["explain", "--help"], "--op NAME")):
        with pytest.raises(SystemExit):
            main(argv)
        assert words in capsys.readouterr().out


def test_a_search_that_the_clock_ended_is_told(saved, capsys, monkeypatch):
    """Such figures may differ from run to run: the text and the JSON say so."""

    def hurried(solution, **options):
        less, more = neighbours(solution, **options)
        return None if less is None else dataclasses.replace(less, timed_out=True), more

    monkeypatch.setattr(checkpoint_solver.cli.explain, "neighbours", hurried)
    assert main(["explain", *saved]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("ended by the time limit of 10.0 s, results may vary") == 1
    budgets = json_of(capsys, "explain", *saved)["budgets"]
    assert [each["cut_short"] for each in budgets] == [True, False, False]
