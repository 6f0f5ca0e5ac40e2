"""Reused plans: legal, within the budget, bounded from below, refused where they do not serve."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace

import pytest

from graphs.graph import Graph, Tensor
from graphs.rewrites import Variants
from solver import solve
from solver.methods import WITHOUT_RECOMPUTATION, KnownPlan, reuse_plan, transfer_schedule
from solver.methods.reuse_known_plan import REUSE_LOSS
from solver.schedule import Request, free_after_last_use, simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.paths import GPT2
from tests.support.small_graphs import op
from tests.support.synthetic_graphs import random_dag


def other_length(graph: Graph, share: float) -> Graph:
    """The step with this share of the bytes of everything that is not there for all of the step."""
    made = graph.producer.keys()

    def scaled(tensor: Tensor) -> Tensor:
        size_bytes = round(share * tensor.size_bytes) if tensor.name in made else tensor.size_bytes
        return dataclasses.replace(tensor, size_bytes=size_bytes)

    return dataclasses.replace(graph, tensors=tuple(map(scaled, graph.tensors)))


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return Graph.load(GPT2)


@pytest.fixture(scope="module")
def budget_bytes(gpt2: Graph) -> int:
    return budget_above_resident(gpt2, 0.7)


@pytest.fixture(scope="module")
def known(gpt2: Graph, budget_bytes: int) -> KnownPlan:
    return KnownPlan.of(solve(gpt2, budget=budget_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.99, 0.9, 0.8])
def test_a_shorter_step_is_as_good_as_searched(
    gpt2: Graph, known: KnownPlan, budget_bytes: int, share: float
) -> None:
    graph = other_length(gpt2, share)
    found = reuse_plan(Variants.of(graph), known, Request(budget_bytes))
    simulation = simulate(graph, found.schedule)
    assert simulation == found.simulation
    assert simulation.peak_bytes <= budget_bytes
    searched = solve(graph, budget=budget_bytes)
    assert found.lower_bound_s <= searched.simulation.time_s
    lost = (simulation.time_s - searched.simulation.time_s) / graph.baseline_time_s
    assert lost <= known.gap + REUSE_LOSS


@pytest.mark.slow
def test_a_longer_step_is_not_served(gpt2: Graph, known: KnownPlan, budget_bytes: int) -> None:
    graph = other_length(gpt2, 1.1)
    assert reuse_plan(Variants.of(graph), known, Request(budget_bytes)) is None
    start = simulate(graph, transfer_schedule(graph, known.schedule))
    assert start.peak_bytes > budget_bytes


def test_a_plan_that_recomputes_far_too_much_is_not_reused(gpt2: Graph, budget_bytes: int) -> None:
    """Each forward op once more at the very end, where nothing needs it."""
    again = [node.name for node in gpt2.forward_nodes if node.recomputable][::-1]
    order = [node.name for node in gpt2.nodes]
    wasteful = KnownPlan(free_after_last_use(gpt2, [*order, *again]), rewrites=(), gap=0.0)
    assert reuse_plan(Variants.of(gpt2), wasteful, Request(budget_bytes)) is None


def test_what_fits_as_it_is_recomputes_nothing(gpt2: Graph) -> None:
    peak_bytes = baseline_peak_bytes(gpt2)
    found = reuse_plan(Variants.of(gpt2), WITHOUT_RECOMPUTATION, Request(peak_bytes))
    assert found.overhead == found.lower_bound_overhead == 0.0
    assert found.status == "optimal"
    assert reuse_plan(Variants.of(gpt2), WITHOUT_RECOMPUTATION, Request(peak_bytes - 1)) is None


def test_the_same_graph_keeps_its_schedule(gpt2: Graph, known: KnownPlan) -> None:
    assert transfer_schedule(gpt2, known.schedule).order == known.schedule.order


def test_operators_that_only_one_of_the_steps_has() -> None:
    """Recomputation before a missing operator waits for the next one; unknown ones are left out."""
    old = _line("a b c loss", "loss_b extra c_b b_b a_b")
    new = _line("a b c norm loss", "loss_b c_b b_b a_b")
    names = "a b c loss loss_b a b extra c_b b_b a a_b"
    schedule = transfer_schedule(new, free_after_last_use(old, names.split()))
    assert " ".join(schedule.order) == "a b c norm loss loss_b a b c_b b_b a a_b"


def test_what_the_step_cannot_recompute_it_holds() -> None:
    old = _line("a b loss", "loss_b b_b a_b")
    new = replace(
        old,
        nodes=tuple(replace(n, recomputable=n.recomputable and n.name != "a") for n in old.nodes),
    )
    names = "a b loss loss_b a b b_b a_b"
    schedule = transfer_schedule(new, free_after_last_use(old, names.split()))
    assert " ".join(schedule.order) == "a b loss loss_b b b_b a_b"


def _line(forward: str, later: str) -> Graph:
    """Nodes that read nothing of each other: only names and order matter."""
    nodes = [op(name, "x", f"t_{name}") for name in forward.split()]
    nodes += [op(name, "x", f"t_{name}", phase="backward") for name in later.split()]
    return Graph(
        nodes=tuple(nodes),
        tensors=(Tensor("x", 1), *(Tensor(f"t_{node.name}", 1) for node in nodes)),
        outputs=(),
    )


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(2000, 2060, 20))
def test_bound_and_schedule_against_brute_force(seed: int) -> None:
    n_reused = 0
    for each in range(seed, seed + 20):
        rng = random.Random(each)
        graph = random_dag(seed=each, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4))
        budget_bytes = least_peak_bytes(graph)
        smaller = other_length(graph, 0.7)
        truth = fastest(smaller, budget_bytes=budget_bytes)
        found = reuse_plan(
            Variants.of(smaller),
            KnownPlan.of(solve(graph, budget=budget_bytes)),
            Request(budget_bytes),
        )
        if found is None or found.simulation is None:
            continue
        n_reused += 1
        assert found.lower_bound_s <= truth.time_s + 1e-9
        assert found.simulation.time_s >= truth.time_s - 1e-9
        assert found.simulation.peak_bytes <= budget_bytes
    assert n_reused >= 10


def test_a_solution_without_schedule_is_no_known_plan(gpt2: Graph) -> None:
    with pytest.raises(ValueError, match="nothing to reuse"):
        KnownPlan.of(solve(gpt2, budget=gpt2.resident_bytes))
