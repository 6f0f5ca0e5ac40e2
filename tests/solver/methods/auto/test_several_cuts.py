"""The rounds of several cuts, whatever other stages have proven before."""

import math

import pytest

from solver.bound.storage_graph import StorageGraph
from solver.methods.auto import stages
from solver.methods.auto.search import Search
from solver.methods.auto.several_cuts import offer_several_cuts
from solver.methods.least_budget import find_obstacle
from tests.support.small_graphs import random_step

Guide = dict[int, frozenset[int]]


def found(seed: int, *, proven_besides: float) -> tuple[Guide, float]:
    """The guide of the cuts at the least budget, and the fastest replay.

    proven_besides: by an earlier stage, above what the single cut proves.
    """
    graph = random_step(seed, n_forward=10, n_later=8)
    budget_bytes = find_obstacle(graph).reached_bytes
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=math.inf)
    with search:
        stages.single_cut(search)
        search.prove(search.binding.lost_share + proven_besides)
        return offer_several_cuts(search, search.binding.cuts), search.best_share


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("seed", [0, 3, 14, 19])
def test_a_bound_of_another_stage_does_not_end_the_rounds(seed: int) -> None:
    guide, best_share = found(seed, proven_besides=0.0)
    assert found(seed, proven_besides=10.0) == (guide, best_share)
    assert len(guide) > 1
