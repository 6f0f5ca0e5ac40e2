"""The cut bound: below the truth for every tiny graph, known values on GPT-2, the least budget."""

import math
import random
from functools import cache
from itertools import pairwise

import pytest

from graphs.graph import Graph, Node, Tensor
from graphs.synthetic.tape import Tape
from solver.bound.cut import TIME_ERROR, CutMilp, solve_cuts
from solver.bound.lower_bound import GAP, binding_cut, lower_bound_s, proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.methods.least_budget import find_obstacle
from solver.schedule.simulator import simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.paths import GPT2
from tests.support.synthetic_graphs import chain, random_dag, residual, u_shape

N_RANDOM = 320


def tiny(seed: int) -> Graph:
    rng = random.Random(seed)
    return random_dag(seed=seed, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4))


def budgets(graph: Graph, least_bytes: int) -> list[int]:
    """The least budget, just above it, and half-way to the baseline's peak."""
    return sorted({least_bytes, least_bytes + 1, (least_bytes + baseline_peak_bytes(graph)) // 2})


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("seed", range(0, N_RANDOM, 20))
def test_bound_is_below_the_truth_on_random_graphs(seed: int) -> None:
    for graph in map(tiny, range(seed, seed + 20)):
        folded = StorageGraph.of(graph)
        least_bytes = least_peak_bytes(graph)
        proven_bytes, _ = proven_least_budget_bytes(folded)
        assert proven_bytes <= least_bytes
        for budget_bytes in budgets(graph, least_bytes):
            truth = fastest(graph, budget_bytes=budget_bytes)
            simulation = simulate(
                graph, truth.schedule(graph)
            )  # the brute force obeys the simulator
            assert simulation.peak_bytes <= budget_bytes
            assert simulation.time_s == pytest.approx(truth.time_s)
            assert lower_bound_s(graph, budget_bytes=budget_bytes) <= truth.time_s + 1e-9


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(1000, 1060, 20))
def test_every_set_of_moments_bounds(seed: int) -> None:
    for graph in map(tiny, range(seed, seed + 20)):
        folded = StorageGraph.of(graph)
        rng = random.Random(seed)
        budget_bytes = least_peak_bytes(graph)
        truth = fastest(graph, budget_bytes=budget_bytes)
        lost = (truth.time_s / graph.baseline_time_s - 1) if graph.baseline_time_s else 0.0
        every = range(1, folded.n_nodes + 1)
        for positions in (every, sorted(rng.sample(every, 2)), [rng.choice(every)]):
            for whole in (True, False):
                cuts = solve_cuts(
                    folded, positions=positions, budget_bytes=budget_bytes, as_milp=whole, gap=0.0
                )
                assert cuts.lost_share <= lost + 1e-9


def test_all_moments_bound_at_least_as_much_as_each() -> None:
    for graph in map(tiny, range(2000, 2030)):
        folded = StorageGraph.of(graph)
        budget_bytes = least_peak_bytes(graph)
        every = range(1, folded.n_nodes + 1)
        options = {"budget_bytes": budget_bytes, "as_milp": True, "gap": 0.0}
        together = solve_cuts(folded, positions=every, **options)
        alone = max(solve_cuts(folded, positions=[p], **options).lost_share for p in every)
        assert together.lost_share >= alone - 1e-5


def repeated_blocks(seed: int) -> Graph:
    """A random block of two operators, three times in a row."""
    rng = random.Random(seed)
    ops = [(rng.choice((1, 2, 3)), rng.choice((1.0, 2.0)), rng.random() < 0.5) for _ in range(2)]
    tape = Tape()
    x = tape.input("x", 4)
    for i in range(3):
        for k, (size_bytes, time_s, saves_inputs) in enumerate(ops):
            x = tape.op(f"{i}.{k}", [x], size_bytes, time_s, saves_inputs=saves_inputs)
    return tape.graph(tape.op("loss", [x], 1, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_counting_what_is_alike_bounds_as_before(seed: int) -> None:
    for graph in map(repeated_blocks, range(seed, seed + 10)):
        folded = StorageGraph.of(graph)
        least_bytes = least_peak_bytes(graph)
        for budget_bytes in budgets(graph, least_bytes):
            truth = fastest(graph, budget_bytes=budget_bytes)
            for p in (folded.n_forward, folded.n_forward + 1):
                lost = []
                for counted in (True, False):
                    program = CutMilp(folded, positions=[p], budget_bytes=budget_bytes)
                    if counted:
                        n_columns = program.n_columns
                        program.count_equal_columns()
                        assert program.n_columns > n_columns
                    lost.append(program.to_cuts(program.program.solve(as_milp=True)).lost_share)
                assert lost[0] == pytest.approx(lost[1], abs=1e-6)
                assert lost[0] <= truth.time_s / graph.baseline_time_s - 1 + 1e-9


@pytest.mark.slow
def test_equal_blocks_are_proven_in_few_nodes() -> None:
    # Which of twelve blocks it is does not matter; without counts it takes 2,000 nodes to see that.
    graph = gpt2()
    least_bytes = find_obstacle(graph).reached_bytes
    folded, budget_bytes = StorageGraph.of(graph), (least_bytes + baseline_peak_bytes(graph)) // 2
    position, _ = binding_cut(folded, budget_bytes=budget_bytes).ranked_positions[0]
    cuts = solve_cuts(
        folded,
        positions=[position],
        budget_bytes=budget_bytes,
        as_milp=True,
        gap=GAP,
        node_limit=200,
    )
    assert cuts.cost_share - cuts.lost_share <= GAP + 2 * TIME_ERROR


@cache
def gpt2() -> Graph:
    return Graph.load(GPT2)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("share", "percent"), [(0.9, 2.23), (0.8, 4.73), (0.7, 8.43), (0.6, 12.13), (1.0, 0.0)]
)
def test_gpt2_bounds(share: float, percent: float) -> None:
    bound_s = lower_bound_s(gpt2(), budget_bytes=budget_above_resident(gpt2(), share))
    assert 100 * (bound_s / gpt2().baseline_time_s - 1) == pytest.approx(percent, abs=0.006)


def test_gpt2_does_not_fit_in_half() -> None:
    assert lower_bound_s(gpt2(), budget_bytes=budget_above_resident(gpt2(), 0.5)) == math.inf
    why = find_obstacle(gpt2())
    assert why.proven_bytes == 2_796_371_970
    assert why.op == "_log_softmax_backward_data"
    assert [size for _, size in why.on_device[:3]] == [823_410_688] * 3


def test_a_chain_has_the_bound_that_counting_gives() -> None:
    # At the first backward op the loss's gradient, x and its gradient and n - 1 more outputs of
    # 1000 bytes are there or are made again for 1 s each, of 100 s in all.
    graph = chain(n_blocks=50)
    peak_bytes = baseline_peak_bytes(graph)
    for n_lost in (1, 7, 20):
        bound_s = lower_bound_s(graph, budget_bytes=peak_bytes - 1000 * n_lost)
        assert bound_s == pytest.approx(100.0 + n_lost, abs=2e-2)


@pytest.mark.slow
def test_lower_budgets_have_higher_bounds() -> None:
    for graph in (residual(n_blocks=8), u_shape(depth=3), gpt2()):
        folded = StorageGraph.of(graph)
        low, high = proven_least_budget_bytes(folded)[0], baseline_peak_bytes(graph)
        shares = [
            binding_cut(folded, budget_bytes=low + (high - low) * k // 6).lost_share
            for k in range(7)
        ]
        # Two MILPs may stop anywhere within their gap.
        assert all(a >= b - 2e-4 for a, b in pairwise(shares))
        assert shares[-1] == 0.0


def test_least_budget_counts_what_may_not_run_again() -> None:
    # f1 runs once, so x or y waits for the end beside big: 4 + 9 bytes and not the 9 of b1 alone.
    graph = Graph(
        nodes=(
            Node("f1", "op", (), ("x",), 1.0, recomputable=False),
            Node("f2", "op", ("x",), ("y",), 1.0),
            Node("b1", "op", (), ("big",), 1.0, phase="backward", recomputable=False),
            Node("b2", "op", ("y",), ("z",), 1.0, phase="backward", recomputable=False),
        ),
        tensors=(Tensor("x", 4), Tensor("y", 6), Tensor("big", 9), Tensor("z", 0)),
        outputs=("z",),
    )
    assert int(StorageGraph.of(graph).least_bytes.max()) == 10
    assert proven_least_budget_bytes(StorageGraph.of(graph))[0] == 13 == least_peak_bytes(graph)


def test_an_output_made_forward_may_be_dropped_and_made_again() -> None:
    graph = Graph(
        nodes=(
            Node("f1", "op", (), ("loss",), 1.0),
            Node("b1", "op", (), ("big",), 1.0, phase="backward", recomputable=False),
            Node("b2", "op", ("big",), ("small",), 1.0, phase="backward", recomputable=False),
        ),
        tensors=(Tensor("loss", 3), Tensor("big", 5), Tensor("small", 1)),
        outputs=("loss", "small"),
    )
    assert fastest(graph, budget_bytes=6).time_s == 4.0
    assert lower_bound_s(graph, budget_bytes=6) == pytest.approx(4.0, abs=1e-5)
    assert lower_bound_s(graph, budget_bytes=6) <= 4.0


def test_views_are_folded_into_their_storage() -> None:
    graph = Graph(
        nodes=(
            Node("f1", "op", (), ("x",), 2.0),
            Node("v", "view", ("x",), ("view",), 0.0),
            Node("f2", "op", ("view",), ("y",), 1.0),
            Node("b1", "op", ("y",), ("g",), 1.0, phase="backward", recomputable=False),
            Node("b2", "op", ("view", "g"), ("h",), 1.0, phase="backward", recomputable=False),
        ),
        tensors=(
            Tensor("x", 4),
            Tensor("view", 4, alias_of="x"),
            Tensor("y", 4),
            Tensor("g", 1),
            Tensor("h", 1),
        ),
        outputs=("h",),
    )
    assert StorageGraph.of(graph).unit_names == ("x", "y", "g", "h")
    assert lower_bound_s(graph, budget_bytes=9) == pytest.approx(5.0)
    truth = fastest(graph, budget_bytes=8)
    assert truth.time_s == 7.0
    assert 6.99 < lower_bound_s(graph, budget_bytes=8) <= 7.0


def test_same_answer_twice() -> None:
    folded = StorageGraph.of(gpt2())
    budget_bytes = budget_above_resident(gpt2(), 0.8)
    assert binding_cut(folded, budget_bytes=budget_bytes) == binding_cut(
        folded, budget_bytes=budget_bytes
    )


def test_what_a_cut_keeps_fits_to_the_byte() -> None:
    """Beside gigabytes, the solver's tolerance on the row of bytes is worth hundreds of bytes."""
    rng = random.Random(0)
    tape = Tape()
    x = tape.input("x", 1 << 31)
    n_kept = 0
    for i in range(24):
        wide = tape.op(f"wide{i}", [x], size_bytes=1 << 31, time_s=1.0)
        small = tape.op(f"small{i}", [wide], size_bytes=rng.randint(1, 40), time_s=0.5)
        x = tape.op(f"join{i}", [wide, small], size_bytes=1 << 31, time_s=1.0)
    graph = tape.graph(tape.op("loss", [x], size_bytes=4, time_s=0.0))
    folded = StorageGraph.of(graph)
    small_bytes = [size for size in folded.unit_bytes if size <= 40]
    p = int(folded.baseline_bytes.argmax())
    for n_wide in range(4, 30, 6):
        budget_bytes = int(folded.least_bytes[p]) + (n_wide << 31) + sum(small_bytes) // 3
        for whole in (False, True):
            kept = solve_cuts(folded, positions=[p], budget_bytes=budget_bytes, as_milp=whole).kept
            if kept is None:
                continue
            n_kept += 1
            held = sum(folded.unit_bytes[u] for u in kept[p] if not folded.is_pinned(u, p))
            room = budget_bytes - int(folded.held_bytes[p]) - int(folded.own_bytes[p])
            assert held <= room
    assert n_kept
