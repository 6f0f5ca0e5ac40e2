"""Windows between marks: below the truth for every tiny graph, above single cuts."""

import random
from collections.abc import Iterator

import pytest

from graphs.graph import Graph
from graphs.synthetic.tape import Tape
from solver.bound.cut import solve_cuts
from solver.bound.milp import Answer, Milp
from solver.bound.rounded_byte_rows import add_rounded_byte_rows
from solver.bound.scip import has_scip, solve_by_scip
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import WindowCuts, lost_share_by_windows, without_small
from solver.methods.least_budget import find_obstacle
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import random_step
from tests.support.synthetic_graphs import chain, random_dag, u_shape


def random_steps(seed: int) -> Iterator[Graph]:
    """Twenty of three kinds: any graph, deep chains with skips, several outputs and aliases."""
    rng = random.Random(seed)
    for k in range(20):
        if k % 3 == 0:
            yield random_dag(
                seed=20 * seed + k, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4)
            )
        elif k % 3 == 1:
            yield skips(rng)
        else:
            yield random_step(seed=20 * seed + k, n_forward=5, n_later=4)


def skips(rng: random.Random) -> Graph:
    """A chain of four operators whose first outputs are read again at its end."""
    tape = Tape()
    made = [tape.input("x", rng.choice((1, 4)))]
    for i in range(4):
        reads = [made[-1]]
        if i > 1 and rng.random() < 0.6:
            reads.append(made[rng.randrange(1, i)])
        size_bytes, time_s = rng.choice((1, 2, 5)), rng.choice((1.0, 2.0))
        made.append(tape.op(f"f{i}", reads, size_bytes, time_s, saves_inputs=rng.random() < 0.7))
    return tape.graph(tape.op("loss", [made[-1]], 1, 1.0))


def answers(program: Milp) -> list[Answer]:
    """As a linear and as an integer program, by both solvers, which prove the same."""
    relaxed, whole = program.solve(as_milp=False), program.solve(as_milp=True)
    if not has_scip():
        return [relaxed, whole]
    by_scip = solve_by_scip(program)
    assert by_scip.bound == pytest.approx(whole.bound, rel=1e-6)
    return [relaxed, whole, by_scip]


def lost(graph: Graph, time_s: float) -> float:
    return (time_s / graph.baseline_time_s - 1) if graph.baseline_time_s else 0.0


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("seed", range(60))
def test_windows_are_below_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    for graph in random_steps(seed):
        folded = StorageGraph.of(graph)
        least_bytes = least_peak_bytes(graph)
        peak_bytes = baseline_peak_bytes(graph)
        budget_bytes = rng.choice((least_bytes, (3 * least_bytes + peak_bytes) // 4))
        truth = lost(graph, fastest(graph, budget_bytes=budget_bytes).time_s)
        assert lost_share_by_windows(folded, budget_bytes=budget_bytes) <= truth + 1e-9
        every = range(1, folded.n_nodes + 1)
        small_bytes = rng.choice((0, 2, 4))
        coarse = without_small(folded, small_bytes=small_bytes)
        for positions in (every, sorted(rng.sample(every, 3))):
            marks = sorted(rng.sample(positions, rng.randint(1, len(positions))))
            program = WindowCuts(
                coarse, positions=positions, marks=marks, budget_bytes=budget_bytes
            )
            for answer in answers(program.program):
                assert program.to_cuts(answer).lost_share <= truth + 1e-9
            add_rounded_byte_rows(program)
            for answer in answers(program.program):
                assert program.to_cuts(answer).lost_share <= truth + 1e-9


@pytest.mark.slow
def test_windows_bound_at_least_as_much_as_the_cut_at_each_mark() -> None:
    for graph in (g for seed in range(2) for g in random_steps(seed)):
        folded, budget_bytes = StorageGraph.of(graph), least_peak_bytes(graph)
        positions = range(1, folded.n_nodes + 1)
        for marks in (positions, positions[::2]):
            program = WindowCuts(
                folded, positions=positions, marks=marks, budget_bytes=budget_bytes
            )
            together = program.to_cuts(program.program.solve(as_milp=False)).lost_share
            for p in marks:
                alone = solve_cuts(
                    folded, positions=[p], budget_bytes=budget_bytes, as_milp=False
                ).lost_share
                assert together >= alone - 1e-5


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("graph", [u_shape(depth=4), chain(n_blocks=24)], ids=["u", "chain"])
def test_windows_see_stretches_that_are_recomputed_again_and_again(graph: Graph) -> None:
    folded = StorageGraph.of(graph)
    budget_bytes = find_obstacle(graph).reached_bytes
    single = max(
        solve_cuts(folded, positions=[p], budget_bytes=budget_bytes, as_milp=True).lost_share
        for p in range(folded.n_forward, folded.n_nodes)
    )
    assert lost_share_by_windows(folded, budget_bytes=budget_bytes) > 1.2 * single
