"""Several in flight: the simulator by hand, bounds and plans by exhaustive search."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

from checkpoint_solver.cli.command import Exit, main
from graphs.graph import Graph, GraphError
from graphs.synthetic.nets import chain
from solver.bound import (
    bound_by_lps,
    bound_by_milp,
    halves,
    span_graph,
    whole_span,
    without_span_nodes,
)
from solver.methods import METHODS, Proposal, find_obstacle
from solver.methods.in_flight import in_flight
from solver.schedule import Solution, baseline, simulate
from solver.sizes_deadlines_progress import OutOfTimeError
from tests.support.brute_force_in_flight import fastest_in_flight
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import json_of
from tests.support.small_graphs import make, op, plan
from tests.support.synthetic_graphs import random_dag

N_RANDOM = 200


def small(seed: int) -> Graph:
    """A random step with two to four micro-batches in flight, half of them with an optimizer."""
    rng = random.Random(seed)
    graph = random_dag(seed=seed, n_forward=rng.randint(2, 5), n_later=rng.randint(1, 4))
    nodes = list(graph.nodes)
    if rng.random() < 0.5 and len(graph.later_nodes) > 1:
        nodes[-1] = dataclasses.replace(nodes[-1], phase="optimizer")
    graph = dataclasses.replace(graph, nodes=tuple(nodes), n_in_flight=rng.randint(2, 4))
    if seed % 2:
        return graph
    made = {name for node in graph.nodes if node.phase == "backward" for name in node.outputs}
    late = tuple(name for name in graph.outputs if name in made and graph.root(name) == name)
    floor_bytes = rng.choice((0, 0, rng.randint(1, 12)))
    in_turn = seed % 4 == 0
    return dataclasses.replace(graph, accumulated=late, others_bytes=floor_bytes, in_turn=in_turn)


def budgets(graph: Graph) -> list[int]:
    """Between what is resident and the peak of the baseline."""
    above_bytes = baseline_peak_bytes(graph) - graph.resident_bytes
    return sorted({graph.resident_bytes + above_bytes * share // 8 for share in (4, 6, 7)})


def some_positions(graph: Graph, rng: random.Random) -> tuple[int, ...]:
    """Of a span graph of this step, in order."""
    has_optimizer = any(node.phase == "optimizer" for node in graph.nodes)
    n_positions = len(graph.nodes) + 1 + 2 * has_optimizer
    return tuple(sorted(rng.sample(range(n_positions), rng.randint(1, min(4, n_positions)))))


def test_the_others_hold_what_the_schedule_saves_until_the_optimizer() -> None:
    graph = make(
        [
            op("f", "x", "a"),
            op("h", "a", "b"),
            op("back", "b a", "g", phase="backward", workspace_bytes=5),
            op("step", "g", "", phase="optimizer", workspace_bytes=3),
        ],
        {"x": 1, "a": 10, "b": 100, "g": 1000},
        outputs="g",
    )
    alone = simulate(graph, plan(graph, "f h -a f back -a -b step"))
    assert alone.live_bytes == (11, 111, 101, 111, 1116, 1101, 1001, 1004)
    assert alone.saved_bytes == 100
    graph = dataclasses.replace(graph, n_in_flight=3)
    found = simulate(graph, plan(graph, "f h -a f back -a -b step"))
    assert found.saved_bytes == 100  # when h has run and a is freed
    assert found.live_bytes == tuple(n + 200 * (i < 7) for i, n in enumerate(alone.live_bytes))
    assert found.peak_bytes == 1116 + 200
    kept = simulate(graph, plan(graph, "f h back -a -b step"))
    assert kept.saved_bytes == 110
    assert kept.peak_bytes == 1116 + 220


def test_those_that_run_backward_in_turn_add_to_the_gradients_of_the_first() -> None:
    graph = make(
        [
            op("f", "x", "a"),
            op("h", "a", "b"),
            op("back", "b a", "g", phase="backward"),
            op("late", "b", "k", phase="backward"),
            op("step", "g k", "", phase="optimizer"),
        ],
        {"x": 1, "a": 10, "b": 100, "g": 1000, "k": 200},
        outputs="g k",
    )
    words = "f h -a f back -a late -b step"
    alone = simulate(graph, plan(graph, words)).live_bytes
    in_turn = dataclasses.replace(
        graph, n_in_flight=3, accumulated=("g", "k"), others_bytes=20, in_turn=True
    )
    found = simulate(in_turn, plan(in_turn, words)).live_bytes
    # two hold 100 each; or one does, one has left 20, and gradients are there before they are made
    others = (200, 200, 200, 1320, 1320, 1320, 320, 320, 0)
    assert found == tuple(map(sum, zip(alone, others, strict=True)))
    less = simulate(in_turn, plan(in_turn, "f h -a -b f h back -a late -b step"))
    assert less.live_bytes[4] == 1 + 10 + 2 * 20 + 1200  # nothing is saved, and two have run


def test_a_graph_keeps_the_number_in_its_file(tmp_path) -> None:
    graph = dataclasses.replace(small(1), n_in_flight=5, in_turn=True)
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json").n_in_flight == 5
    assert Graph.load(tmp_path / "graph.json").in_turn
    assert graph.module_part().n_in_flight == 1
    assert graph.graph_id == dataclasses.replace(graph, n_in_flight=1).graph_id
    with pytest.raises(GraphError, match="n_in_flight is 0"):
        dataclasses.replace(graph, n_in_flight=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, N_RANDOM, 5))
def test_every_cover_by_spans_is_below_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    for graph in map(small, range(seed, seed + 5)):
        for budget_bytes in budgets(graph):
            truth = fastest_in_flight(graph, budget_bytes=budget_bytes)
            spans = [whole_span(graph, budget_bytes=budget_bytes)]
            if math.isinf(spans[0].lost_share):
                assert truth.ops is None
                continue
            if truth.ops is not None:  # the exhaustive search obeys the simulator
                found = simulate(graph, truth.schedule(graph))
                assert found.peak_bytes <= budget_bytes
                assert found.time_s == pytest.approx(truth.time_s)
                held_bytes = max(found.saved_bytes, graph.others_bytes)
                assert spans[0].least_bytes <= held_bytes <= spans[0].most_bytes
            base_s = graph.baseline_time_s
            for _ in range(4):
                cuts = [bound_by_lps(graph, span, budget_bytes=budget_bytes) for span in spans]
                spans = [cut.span for cut in cuts]
                several = [
                    dataclasses.replace(cut, positions=some_positions(graph, rng)) for cut in cuts
                ]
                whole = [
                    bound_by_milp(graph, cut, budget_bytes=budget_bytes, gap=0.0).span
                    for cut in (*cuts, *several)
                ]
                for of_cover in (spans, whole[: len(cuts)], whole[len(cuts) :]):
                    least = min(span.lost_share for span in of_cover)
                    assert least * base_s + base_s <= truth.time_s + 1e-9 or truth.ops is None
                    if truth.ops is not None:
                        assert not math.isinf(least)
                wide = [span for span in spans if span.width_bytes]
                spans = [span for span in spans if not span.width_bytes]
                spans += [half for span in wide for half in halves(span)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ilp", "auto"])
@pytest.mark.parametrize("seed", range(0, N_RANDOM, 5))
def test_plans_and_their_bounds_are_true(seed: int, method: str) -> None:
    for graph in map(small, range(seed, seed + 5)):
        for budget_bytes in budgets(graph):
            truth = fastest_in_flight(graph, budget_bytes=budget_bytes)
            proposal = METHODS[method](graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0)
            assert proposal.lower_bound_s <= truth.time_s + 1e-9
            if proposal.schedule is None:
                assert truth.ops is None
                continue
            found = simulate(graph, proposal.schedule)
            assert found.peak_bytes <= budget_bytes
            assert found.time_s >= truth.time_s - 1e-9
            if method == "ilp":
                assert found.time_s == pytest.approx(truth.time_s, abs=1e-9)


@pytest.mark.slow
def test_gradients_that_are_there_count_for_what_is_recomputed_before_the_first_later_node() -> (
    None
):
    graph, budget_bytes = small(10954), 11
    assert graph.accumulated
    truth = fastest_in_flight(graph, budget_bytes=budget_bytes)
    found = METHODS["ilp"](graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0)
    assert simulate(graph, found.schedule).time_s == pytest.approx(truth.time_s)


@pytest.mark.slow
def test_a_search_that_is_ended_early_proves_no_more_than_is_true() -> None:
    left = 0

    def propose(graph: Graph, **options: Any) -> Proposal:
        nonlocal left
        if not left:
            raise OutOfTimeError
        left -= 1
        return METHODS["ilp"](graph, **options)

    for graph in map(small, range(500, 505)):
        for budget_bytes in budgets(graph)[1:]:
            truth = fastest_in_flight(graph, budget_bytes=budget_bytes)
            for n_calls in (0, 1, 3):
                left = n_calls
                found = in_flight(propose)(
                    graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0
                )
                assert found.lower_bound_s <= truth.time_s + 1e-9


@pytest.mark.parametrize("seed", range(400, 430, 10))
def test_the_least_budget_is_between_what_is_proven_and_the_truth(seed: int) -> None:
    for graph in map(small, range(seed, seed + 5)):
        obstacle = find_obstacle(graph)
        assert simulate(graph, obstacle.schedule).peak_bytes == obstacle.reached_bytes
        below_bytes = obstacle.proven_bytes - 1
        assert fastest_in_flight(graph, budget_bytes=below_bytes).ops is None


def test_a_span_graph_is_the_step_of_one_micro_batch() -> None:
    for graph in map(small, range(100, 130)):
        peak_bytes = baseline_peak_bytes(graph)
        saved_bytes = simulate(graph, baseline(graph)).saved_bytes
        whole = whole_span(graph, budget_bytes=peak_bytes)
        point = dataclasses.replace(whole, least_bytes=saved_bytes, most_bytes=saved_bytes)
        alone = span_graph(graph, point, budget_bytes=peak_bytes)
        assert alone.n_in_flight == 1
        schedule = baseline(alone)
        assert simulate(alone, schedule).peak_bytes <= peak_bytes
        assert simulate(graph, without_span_nodes(graph, schedule)).peak_bytes <= peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["now_s", "interrupted"])
@pytest.mark.parametrize("seed", [506, 537])  # where a span that got lost would show
def test_wherever_the_clock_or_ctrl_c_ends_the_search_its_bound_holds(
    monkeypatch: pytest.MonkeyPatch, seed: int, ended_by: str
) -> None:
    """The clock counts how often it is looked at; so does the look whether Ctrl-C was pressed."""
    graph, n_looked, n_looks = small(seed), 0, 0

    def looked() -> float | bool:
        nonlocal n_looked
        n_looked += 1
        return n_looked if ended_by == "now_s" else n_looked > n_looks

    for budget_bytes in budgets(graph):
        truth = fastest_in_flight(graph, budget_bytes=budget_bytes)
        for n_looks in range(24):
            limit_s = n_looks + 0.5 if ended_by == "now_s" else 600.0
            with monkeypatch.context() as patched:
                patched.setattr(f"solver.sizes_deadlines_progress.deadline.{ended_by}", looked)
                n_looked = 0
                found = METHODS["ilp"](
                    graph, budget_bytes=budget_bytes, time_limit_s=limit_s, seed=0
                )
            assert found.lower_bound_s <= truth.time_s + 1e-9
            if found.schedule is not None:
                assert simulate(graph, found.schedule).peak_bytes <= budget_bytes


def test_a_method_proposes_its_own_schedules_only() -> None:
    graph = dataclasses.replace(chain(n_blocks=4), n_in_flight=3)
    peak_bytes = baseline_peak_bytes(graph)
    options: dict[str, Any] = {"budget_bytes": peak_bytes - 1, "time_limit_s": 600, "seed": 0}
    assert METHODS["auto"](graph, **options).schedule is not None
    assert METHODS["none"](graph, **options).schedule is None


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("method", ["auto", "ilp", "sqrt"])
def test_the_command_plans_several_micro_batches(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = dataclasses.replace(chain(n_blocks=4), n_in_flight=3)
    path, written = tmp_path / "graph.json", tmp_path / "s.json"
    graph.save(path)
    budget_bytes = baseline_peak_bytes(graph) * 9 // 10
    options = ["--budget", str(budget_bytes), "--method", method, str(path)]
    assert main([*options, "-o", str(written)]) == Exit.SOLVED
    assert "for backward per micro-batch in flight" in " ".join(capsys.readouterr().out.split())
    found = Solution.load(written, graph=graph)
    assert found.simulation == simulate(graph, found.schedule)
    assert found.simulation.peak_bytes <= budget_bytes
    answer = json_of(capsys, *options)
    assert answer["exit_code"] == 0


def test_the_command_copies_nothing_of_several_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataclasses.replace(chain(n_blocks=4), n_in_flight=3).save(tmp_path / "graph.json")
    options = ["--budget", "1GB", "--host", "1GB", "--host-link", "1GB/s"]
    assert main([*options, str(tmp_path / "graph.json")]) == Exit.USAGE
    assert "in flight" in capsys.readouterr().err


def test_the_command_says_what_several_micro_batches_need_at_least(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = dataclasses.replace(chain(n_blocks=4), n_in_flight=3)
    graph.save(tmp_path / "graph.json")
    options = ["--budget", f"{graph.resident_bytes + 1}B", str(tmp_path / "graph.json")]
    assert main(options) == Exit.INFEASIBLE
    assert "minimum budget" in capsys.readouterr().err
