"""Every method on random graphs, shapes of nets and GPT-2: legal, within the budget, exact."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.synthetic.nets import recurrent, residual
from solver.chain.blocks import split_into_blocks
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.proposal import Proposal
from solver.methods.registry import METHODS
from solver.methods.revolve import revolve
from solver.methods.sqrt import segment_counts, sqrt
from solver.schedule.ops import Schedule
from solver.schedule.simulator import Simulation, simulate
from solver.sizes_deadlines_progress.deadline import ctrl_c_ends_searches
from tests.support import synthetic_graphs
from tests.support.brute_force import fastest
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.paths import DATA, GPT2
from tests.support.small_graphs import make, op, random_step, uniform_chain

ON_BLOCKS = [name for name in ("every_block", "sqrt", "revolve", "dp") if name in METHODS]


def run(name: str, graph: Graph, budget_bytes: int, *, time_limit_s: float = 600.0) -> Proposal:
    return METHODS[name](graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, seed=0)


def simulated(graph: Graph, proposal: Proposal) -> Simulation | None:
    return simulate(graph, proposal.schedule) if proposal.schedule else None


def test_the_methods_and_their_order() -> None:
    known = ("auto", "none", "every_block", "sqrt", "revolve", "dp", "ilp")
    known += ("disk_revolve", "periodic_disk_revolve", "hrevolve", "multistage")
    assert list(METHODS) == [name for name in known if name in METHODS]
    assert {"none", "every_block", "sqrt"} <= set(METHODS)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", ["none", *ON_BLOCKS])
@pytest.mark.parametrize("block", range(4))
def test_whatever_the_graph_what_is_proposed_is_legal_and_fits(name: str, block: int) -> None:
    n_found = 0
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(seed)
        graph = random_step(seed, n_forward=rng.randint(0, 14), n_later=rng.randint(0, 10))
        for part in (1.0, 0.9, 0.6):
            budget_bytes = budget_above_resident(graph, part)
            simulation = simulated(graph, run(name, graph, budget_bytes))
            if simulation:
                n_found += 1
                assert simulation.peak_bytes <= budget_bytes
                assert simulation.time_s >= graph.baseline_time_s
    assert n_found > (0 if name == "none" else 40)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "every_block"])
def test_where_nothing_need_be_recomputed_nothing_is(name: str) -> None:
    for graph in (
        uniform_chain(6),
        random_step(5),
        random_step(9),
        make([], {"x": 3}),
    ):
        simulation = simulated(graph, run(name, graph, baseline_peak_bytes(graph)))
        assert simulation.time_s == pytest.approx(graph.baseline_time_s)


@pytest.mark.parametrize("name", list(METHODS))
def test_where_nothing_fits_nothing_is_proposed(name: str) -> None:
    graph = uniform_chain(5)
    assert run(name, graph, graph.resident_bytes).schedule is None


@pytest.mark.parametrize("name", ON_BLOCKS)
def test_the_same_question_has_the_same_answer(name: str) -> None:
    graph = synthetic_graphs.residual(n_blocks=6)
    budget_bytes = budget_above_resident(graph, 0.6)
    assert run(name, graph, budget_bytes) == run(name, graph, budget_bytes)


@pytest.mark.parametrize("name", ON_BLOCKS)
def test_a_time_limit_leaves_a_legal_answer_or_none(name: str) -> None:
    graph = synthetic_graphs.recurrent(n_steps=40)
    for share in (0.5, 1.0):  # at 1, revolve and dp have an answer at once
        budget_bytes = budget_above_resident(graph, share)
        simulation = simulated(graph, run(name, graph, budget_bytes, time_limit_s=0.0))
        assert simulation is None or simulation.peak_bytes <= budget_bytes
        assert (simulation is not None) == (share == 1.0 and name in ("revolve", "dp"))


SHAPES = {
    "chain": synthetic_graphs.chain(n_blocks=24),
    "residual": synthetic_graphs.residual(n_blocks=12),
    "u_shape": synthetic_graphs.u_shape(depth=4),
    "pyramid": synthetic_graphs.pyramid(n_blocks=(2, 2, 2, 2)),
    "dense": synthetic_graphs.dense(n_layers=10),
    "recurrent": synthetic_graphs.recurrent(n_steps=24),
    "transformer": synthetic_graphs.transformer(
        n_layers=4, hidden=1024, n_tokens=8192, n_words=4096
    ),
}


@pytest.mark.slow(sample=7)
@pytest.mark.parametrize("name", ON_BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_nets(name: str, shape: str) -> None:
    graph = SHAPES[shape]
    found = []
    for part in (0.9, 0.7, 0.5):
        budget_bytes = budget_above_resident(graph, part)
        simulation = simulated(graph, run(name, graph, budget_bytes))
        if simulation:
            assert simulation.peak_bytes <= budget_bytes
            found.append(simulation.time_s)
    assert found == sorted(found) or name == "revolve"  # less memory is not faster
    if name == "sqrt":
        assert len(found) >= 2
        assert found[0] <= 1.09 * graph.baseline_time_s  # a tenth of the memory costs little


# GPT-2 small, as shipped: 364 nodes in 29 blocks, more than half of the peak at its logits.


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return Graph.load(DATA / "gpt2_small_b8_t1024.json")


def overhead(graph: Graph, simulation: Simulation) -> float:
    return simulation.time_s / graph.baseline_time_s - 1


def test_every_block_on_gpt2(gpt2: Graph) -> None:
    """What is recomputed: of each branch all but the matrix product and the sum at its end."""
    simulation = simulated(gpt2, run("every_block", gpt2, baseline_peak_bytes(gpt2)))
    assert simulation.n_recomputed == 12 * 3 + 12 * 3 + 2  # norm, qkv, attention; norm, mlp, gelu
    assert simulation.peak_bytes < budget_above_resident(gpt2, 0.57)
    assert 0.13 < overhead(gpt2, simulation) < 0.14
    assert run("every_block", gpt2, budget_above_resident(gpt2, 0.55)).schedule is None


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize(
    ("part", "most"),
    [(1.0, 0.0), (0.9, 0.035), (0.8, 0.07), (0.7, 0.1), (0.6, 0.13), (0.52, 0.21)],
)
def test_sqrt_on_gpt2(gpt2: Graph, part: float, most: float) -> None:
    simulation = simulated(gpt2, run("sqrt", gpt2, budget_above_resident(gpt2, part)))
    assert overhead(gpt2, simulation) <= most


# A uniform chain of n blocks: unit tensors x_0 (resident) .. x_n, gradients g_n .. g_0, n forward
# nodes, a loss and n backward nodes of a second each. Without recomputation the peak is n + 2: at
# the loss x_0 .. x_n and g_n.


def recomputed(name: str, n_blocks: int, budget_bytes: int) -> int | None:
    graph = uniform_chain(n_blocks)
    simulation = simulated(graph, run(name, graph, budget_bytes))
    return simulation.n_recomputed if simulation else None


def test_every_block_of_one_op_keeps_everything() -> None:
    assert recomputed("every_block", 9, 11) == 0
    assert recomputed("every_block", 9, 10) is None


def test_sqrt_on_a_chain_by_hand() -> None:
    # Four segments of four, the last one whole, of the others all but the end made again: 3 * 3.
    # At the loss there are x_0, x_4, x_8, x_12, x_13 .. x_16 and g_16: 9 bytes.
    assert recomputed("sqrt", 16, 9) == 9
    # Each byte more is one tensor kept.
    counts = [recomputed("sqrt", 16, budget_bytes) for budget_bytes in range(18, 8, -1)]
    assert counts == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert recomputed("sqrt", 16, 5) is None


@pytest.mark.parametrize("name", [name for name in ON_BLOCKS if name != "every_block"])
@pytest.mark.parametrize("n_blocks", [2, 3, 4, 5])
def test_no_method_beats_the_truth_on_small_chains(name: str, n_blocks: int) -> None:
    graph = uniform_chain(n_blocks)
    for budget_bytes in range(n_blocks + 2, 2, -1):
        truth = fastest(graph, budget_bytes=budget_bytes)
        simulation = simulated(graph, run(name, graph, budget_bytes))
        if simulation:
            assert simulation.time_s >= truth.time_s


def test_segment_counts() -> None:
    assert segment_counts(0) == [1]
    assert segment_counts(1) == [1]
    assert segment_counts(6) == [1, 2, 3, 4, 5, 6]
    assert segment_counts(29) == [1, 2, 3, 4, 5, 6, 9, 13, 19, 28, 29]
    assert segment_counts(300)[-1] == 300


def test_the_last_block_is_dropped_only_if_it_must_be() -> None:
    """The caller's loss takes much workspace after the last block: then that is recomputed too."""
    nodes = [op("f", "x", "a"), op("g", "a", "h"), op("k", "h", "y")]
    nodes.append(op("criterion", "y", "gy", phase="outside", workspace_bytes=20))
    nodes.append(op("b", "h y gy", "ga", phase="backward"))
    nodes.append(op("c", "x ga", "gx", phase="backward"))
    sizes = {"x": 1, "a": 1, "h": 9, "y": 1, "gy": 1, "ga": 1, "gx": 1}
    graph = make(nodes, sizes, outputs="gx")
    assert baseline_peak_bytes(graph) == 1 + 9 + 1 + 1 + 20
    assert [len(block) for block in split_into_blocks(graph).forward] == [1, 2]
    roomy = simulated(graph, every_block(graph, budget_bytes=32, time_limit_s=600, seed=0))
    tight = simulated(graph, every_block(graph, budget_bytes=31, time_limit_s=600, seed=0))
    assert (roomy.n_recomputed, tight.n_recomputed) == (0, 1)
    recomputable = simulated(graph, sqrt(graph, budget_bytes=31, time_limit_s=600, seed=0))
    assert recomputable is not None


@pytest.mark.parametrize("name", ON_BLOCKS)
def test_an_interrupted_search_hands_on_the_best_so_far(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = synthetic_graphs.residual(n_blocks=6)
    n_simulated = 0

    def simulate_then_ctrl_c(graph: Graph, schedule: Schedule, **options: Any) -> Simulation:
        nonlocal n_simulated
        n_simulated += 1
        if n_simulated == 2:
            signal.raise_signal(signal.SIGINT)
        return simulate(graph, schedule, **options)

    monkeypatch.setattr("solver.methods.best_so_far.simulate_if_legal", simulate_then_ctrl_c)
    with ctrl_c_ends_searches() as interrupt:
        proposal = run(name, graph, budget_above_resident(graph, 0.9))
    assert interrupt.is_set()
    if name == "every_block":  # its first schedule fits
        assert proposal.schedule is not None
    else:
        assert proposal.timed_out


SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


@pytest.mark.parametrize("method", [dp, revolve, sqrt])
@pytest.mark.parametrize(
    ("make_graph", "shares"),
    [
        (partial(residual, n_blocks=12), SHARES),
        (partial(recurrent, n_steps=8), SHARES),
        (partial(uniform_chain, 9), SHARES),
        pytest.param(partial(Graph.load, GPT2), (0.7, 0.94), marks=pytest.mark.slow),
    ],
    ids=["residual", "recurrent", "chain", "gpt2"],
)
def test_what_is_not_worth_a_simulation_hides_no_answer(
    make_graph: Callable[[], Graph], shares: tuple[float, ...], method: Any
) -> None:
    """With a limit that the method's own answer just meets, it is still found."""
    graph = make_graph()
    peak_bytes = baseline_peak_bytes(graph)
    n_found = 0
    for share in shares:
        options = {"budget_bytes": int(share * peak_bytes), "time_limit_s": 600.0, "seed": 0}
        found = method(graph, **options)
        if found.schedule is None:
            continue
        time_s = simulate(graph, found.schedule).time_s
        for limits in ((0.0, 1.001), (0.999, 1.001), (0.0, 1.02)):
            least_s, most_s = (limit * time_s for limit in limits)
            again = method(graph, **options, worth_between_s=(least_s, most_s))
            assert simulate(graph, again.schedule).time_s == time_s
            n_found += 1
    assert n_found > 0
