"""The chain problems' answers on graphs: as many recomputations as the theory says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from graphs import synthetic
from solver.blocks import cut
from solver.chain_methods import play_reversal, revolve
from solver.revolve import n_extra_steps
from solver.simulate import simulate
from tests.builders import uniform_chain


@pytest.mark.parametrize("n_blocks", [1, 2, 5, 10, 33])
@pytest.mark.parametrize("n_snapshots", [1, 2, 3, 7, 40])
def test_reversal_of_a_uniform_chain_takes_the_fewest_steps(
    n_blocks: int, n_snapshots: int
) -> None:
    """b_i reads x_{i-1} alone, so nothing is recomputed but to get there.

    Of the steps that save nothing n - 1 are first runs.
    """
    graph = uniform_chain(n_blocks)
    trace = simulate(graph, play_reversal(graph, cut(graph), n_snapshots=n_snapshots))
    extra = n_extra_steps(n_steps=n_blocks, n_snapshots=n_snapshots)
    assert trace.n_recomputed == extra - (n_blocks - 1)
    # snapshots (x_0 is one), the state, the next one, two gradients; at most all states at the loss
    assert trace.peak_bytes <= min(n_snapshots + 3, n_blocks + 2)


def test_fewer_snapshots_take_less_memory_and_more_time() -> None:
    graph = uniform_chain(30)
    blocks = cut(graph)
    traces = [simulate(graph, play_reversal(graph, blocks, n_snapshots=n)) for n in range(1, 31)]
    assert all(few.time_s >= many.time_s for few, many in pairwise(traces))
    assert all(few.peak_bytes <= many.peak_bytes for few, many in pairwise(traces))


def test_revolve_reaches_budgets_that_running_once_more_cannot() -> None:
    graph = synthetic.chain(n_blocks=40)
    budget_bytes = 7000
    proposal = revolve(graph, budget_bytes=budget_bytes, time_limit_s=9.0, seed=0)
    assert proposal.schedule is not None
    trace = simulate(graph, proposal.schedule)
    assert trace.peak_bytes <= budget_bytes
    assert trace.n_recomputed > 2 * 41
