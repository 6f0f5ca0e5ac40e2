"""Rounded rows of bytes: no whole solution is lost, and the linear program is nearly whole."""

import random

import pytest

from solver.bound.cut import CutMilp
from solver.bound.rounded_byte_rows import add_rounded_byte_rows, round_down_row
from solver.bound.storage_graph import StorageGraph
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import random_step
from tests.support.synthetic_graphs import chain, random_dag


def solved(program: CutMilp, *, whole: bool) -> float:
    return program.to_cuts(program.program.solve(as_milp=whole)).lost_share


def test_every_set_of_units_within_the_room_keeps_to_the_row() -> None:
    rng = random.Random(0)
    at_the_limit = 0
    for _ in range(3000):
        scale = rng.choice((1, 7, 1000))
        sizes = [scale * rng.randint(1, 12) + rng.randrange(scale) for _ in range(6)]
        room = rng.randint(max(sizes), sum(sizes) - 1)
        times, most = round_down_row(sizes, room)
        held = [
            sum(n for i, n in enumerate(times) if chosen >> i & 1)
            for chosen in range(2**6)
            if sum(b for i, b in enumerate(sizes) if chosen >> i & 1) <= room
        ]
        assert max(held) <= most
        at_the_limit += max(held) == most
    assert at_the_limit > 1000  # the row is no weaker than it has to be


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_they_are_below_the_truth_and_leave_the_integer_program_as_it_is(seed: int) -> None:
    rng = random.Random(seed)
    for k in range(25):
        if k % 2:
            graph = random_step(seed=100 * seed + k, n_forward=5, n_later=4)
        else:
            sizes = {"n_forward": rng.randint(2, 6), "n_later": rng.randint(1, 4)}
            graph = random_dag(seed=100 * seed + k, **sizes)
        least_bytes = least_peak_bytes(graph)
        budget_bytes = rng.randint(least_bytes, max(least_bytes, baseline_peak_bytes(graph) - 1))
        share = fastest(graph, budget_bytes=budget_bytes).time_s / (graph.baseline_time_s or 1.0)
        truth = max(0.0, share - 1.0)
        folded = StorageGraph.of(graph)
        every = range(1, folded.n_nodes + 1)
        for n_positions in (1, 1, 2, 3):
            positions = sorted(rng.sample(every, n_positions))
            program = CutMilp(folded, positions=positions, budget_bytes=budget_bytes)
            plain = {whole: solved(program, whole=whole) for whole in (True, False)}
            add_rounded_byte_rows(program)
            rounded = {whole: solved(program, whole=whole) for whole in (True, False)}
            assert rounded[True] == pytest.approx(plain[True], abs=1e-5)
            assert plain[False] - 1e-5 <= rounded[False] <= truth + 1e-9
            assert rounded[True] <= truth + 1e-9


@pytest.mark.slow
def test_the_linear_program_of_equal_units_is_whole() -> None:
    folded = StorageGraph.of(chain(n_blocks=12))
    closed = 0
    least_bytes, most_bytes = int(folded.least_bytes.max()), int(folded.baseline_bytes.max())
    for budget_bytes in range(least_bytes, most_bytes, 97):
        p = int(folded.baseline_bytes.argmax())
        program = CutMilp(folded, positions=[p], budget_bytes=budget_bytes)
        whole, before = solved(program, whole=True), solved(program, whole=False)
        add_rounded_byte_rows(program)
        after = solved(program, whole=False)
        closed += before < whole - 1e-4 and after > whole - 1e-4
    assert closed


def test_where_what_must_be_there_exceeds_the_budget_nothing_is_added() -> None:
    folded = StorageGraph.of(chain(n_blocks=3))
    p = int(folded.least_bytes.argmax())
    budget_bytes = int(folded.least_bytes[p]) - 1
    program = CutMilp(folded, positions=[p], budget_bytes=budget_bytes)
    most = [*program.program.most]
    add_rounded_byte_rows(program)
    assert [*program.program.most] == most
