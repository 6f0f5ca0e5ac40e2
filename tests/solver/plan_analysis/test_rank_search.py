"""Stages that share a rank's budget: plans and bounds against an exhaustive search."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest

from graphs.graph import Graph
from graphs.pipeline import Pipeline, PipelineError, with_pipeline
from solver.plan_analysis import (
    RankPlans,
    micro_batch_s,
    rank_peak_bytes,
    rank_search,
    share_rank_budget,
)
from solver.plan_analysis.planned_stages import optimizer_s
from solver.plan_analysis.rank_peak import StageBytes, held_in_flight, resident_bytes
from solver.schedule import Request, Solution, baseline, simulate
from solver.solving import attempt
from tests.support.brute_force_in_flight import fastest_beside
from tests.support.paths import GPT2
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag

N_RANDOM = 100


def rank_of(seed: int) -> tuple[Pipeline, list[Graph]]:
    """Two random stages, a few times three, of a rank; half of them with an optimizer."""
    rng = random.Random(seed)
    n_local, n_ranks = 3 if seed % 10 == 0 else 2, rng.randint(1, 2)
    n_stages, n_microbatches = n_local * n_ranks, n_ranks * rng.randint(1, 2)
    rank, graphs = rng.randrange(n_ranks), []
    for stage in range(rank, n_stages, n_ranks):
        most = 3 if n_local == 3 else 4
        graph = random_dag(
            seed=rng.randrange(10**6), n_forward=rng.randint(2, most), n_later=rng.randint(1, 3)
        )
        place = Pipeline(stage, n_stages, n_microbatches, "interleaved", n_local)
        graphs.append(with_pipeline(graph, place))
    return place, graphs


def planned(graph: Graph, budget_bytes: int, method: str) -> Solution:
    return attempt(graph, Request(budget_bytes, method=method))


def taken(graph: Graph) -> StageBytes:
    return StageBytes.of(graph, plain := baseline(graph), simulate(graph, plain))


def truth_s(place: Pipeline, graphs: list[Graph], budget_bytes: int) -> float:
    """The least time over all bytes that each stage may save."""
    room_bytes = budget_bytes - resident_bytes(list(map(taken, graphs)))
    made = [
        sum(
            graph.tensor_by_name[name].size_bytes for n in graph.forward_nodes for name in n.outputs
        )
        for graph in graphs
    ]

    @functools.cache
    def least_s(local: int, most_bytes: int, others_bytes: int) -> float:
        graph = graphs[local]
        budget = graph.resident_bytes + room_bytes
        return fastest_beside(graph, budget, most_bytes, others_bytes).time_s

    def time_s(saved: tuple[int, ...]) -> float:
        total_s = 0.0
        for local, most in enumerate(saved):
            passes = (others for at, others in place.passes if at == local)
            others_bytes = max(held_in_flight(others, saved) for others in passes)
            if total_s < best_s and others_bytes <= room_bytes:
                total_s += least_s(local, most, others_bytes)
            else:
                return math.inf
        return total_s

    best_s = math.inf
    for saved in itertools.product(*(range(each + 1) for each in made)):
        best_s = min(best_s, time_s(saved))
    return best_s


def budgets(place: Pipeline, graphs: list[Graph]) -> list[int]:
    plain = [planned(graph, 10**9, "none") for graph in graphs]
    least, most = resident_bytes(list(map(taken, graphs))), rank_peak_bytes(plain)
    return sorted({least + (most - least) * share // 8 for share in (4, 6, 7)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, N_RANDOM, 5))
def test_plans_and_their_bound_are_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, graphs in map(rank_of, range(seed, seed + 5)):
        for budget_bytes in budgets(place, graphs):
            true_s = truth_s(place, graphs, budget_bytes)
            for method, n_boxes in (("ilp", 10**6), ("auto", rank_search.N_BOXES), ("auto", 1)):
                monkeypatch.setattr(rank_search, "N_BOXES", n_boxes)
                given = [planned(graph, budget_bytes, method) for graph in graphs]
                if math.isinf(true_s):
                    with pytest.raises(PipelineError, match="no plans of this rank's stages fit"):
                        share_rank_budget(given)
                    continue
                found = shared(given)
                if found is None:
                    assert method != "ilp"
                    continue
                assert rank_peak_bytes(found) == found.peak_bytes <= budget_bytes
                assert found.lower_bound_s <= true_s + 1e-9
                assert found.time_s >= true_s - 1e-9
                if method == "ilp":  # whose plans are optima
                    assert found.time_s <= true_s + rank_search.GAP * found.baseline_s + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 12, 23])
def test_wherever_ctrl_c_ends_the_search_its_bound_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, graphs = rank_of(seed)
    n_ended = 0

    for budget_bytes in budgets(place, graphs):
        true_s = truth_s(place, graphs, budget_bytes)
        given = [planned(graph, budget_bytes, "ilp") for graph in graphs]
        for n_looks in range(30):
            looks = itertools.count(-n_looks)
            with monkeypatch.context() as patched:
                patched.setattr(
                    "solver.sizes_deadlines_progress.deadline.interrupted",
                    lambda looks=looks: next(looks) >= 0,
                )
                if math.isinf(true_s):
                    with pytest.raises(PipelineError):
                        share_rank_budget(given)
                    continue
                found = shared(given)
            n_ended += found is None or found.timed_out
            assert found is None or found.lower_bound_s <= true_s + 1e-9
    assert n_ended > 0


def shared(given: list[Solution]) -> RankPlans | None:
    try:
        return share_rank_budget(given)
    except PipelineError as error:
        assert "(proven)" not in str(error)  # noqa: PT017
        return None


@pytest.mark.slow
def test_what_is_proven_holds_for_plans_that_save_less_beside_others_that_hold_more() -> None:
    n_looser = 0
    for seed in range(12):
        place, graphs = rank_of(seed)
        graph, room_bytes = graphs[0], budgets(place, graphs)[-1]
        stage = rank_search.Stage(planned(graph, room_bytes, "auto"), [(1,) * len(graphs)])
        points = list(itertools.product(range(0, 12, 3), range(0, 12, 3)))
        for most_bytes, others_bytes in points[::2]:
            stage.plan(0, most_bytes, others_bytes, room_bytes=room_bytes, left_s=600)
        plain_s = stage.plain[0].time_s
        for most_bytes, others_bytes in points:
            budget_bytes = graph.resident_bytes + room_bytes
            truth = fastest_beside(graph, budget_bytes, most_bytes, others_bytes)
            bound_s = stage.bound_s(0, most_bytes, others_bytes)
            assert bound_s <= truth.time_s - optimizer_s(graph) + 1e-9
            n_looser += plain_s < bound_s
    assert n_looser > 20


def test_the_optimizer_steps_for_all_stages_of_a_rank() -> None:
    nodes = [
        op("f", "x", "a"),
        op("back", "a", "g", phase="backward", workspace_bytes=5),
        op("step", "g", "", phase="optimizer", workspace_bytes=100),
    ]
    graph = make(nodes, {"x": 1, "a": 10, "g": 2}, outputs="g")
    places = [Pipeline(stage, 2, 1, "interleaved", 2) for stage in (0, 1)]
    graphs = [with_pipeline(graph, place) for place in places]
    found = rank_peak_bytes([planned(each, 10**6, "none") for each in graphs])
    assert found == resident_bytes(list(map(taken, graphs))) + 2 * (100 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_two_stages_of_the_size_of_gpt2_are_proven(share: float) -> None:
    places = [Pipeline(stage, 4, 4, "interleaved", 2) for stage in (0, 2)]
    graphs = [with_pipeline(Graph.load(GPT2), place) for place in places]
    plain_bytes = rank_peak_bytes([planned(graph, 10**12, "none") for graph in graphs])
    least_bytes = resident_bytes(list(map(taken, graphs)))
    budget_bytes = least_bytes + int(share * (plain_bytes - least_bytes))
    alone = [planned(graph, budget_bytes, "auto") for graph in graphs]
    found = share_rank_budget(alone)
    assert found.peak_bytes <= budget_bytes
    assert found.gap < 5e-4
    assert found.status == "optimal"
    assert "2 stages, optimal, budget " in repr(found)
    # equal stages do not save the same where one of them has more in flight while the other runs
    assert found.time_s < math.fsum(micro_batch_s(each) or math.inf for each in alone)
