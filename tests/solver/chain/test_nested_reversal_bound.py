"""The bound of nested reversals: below the truth, whatever the levels, and close on deep chains."""

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from graphs.graph import Graph
from graphs.synthetic import nets
from graphs.synthetic.tape import Tape
from solver.bound import StorageGraph, lower_bound_s
from solver.chain import (
    n_extra_steps,
    nested_reversal_bound,
    nested_reversal_levels,
    reversal_bound,
    split_into_blocks,
)
from solver.chain.nested_reversal_bound import (
    equal_bound_s,
    least_recompute_s,
    longest_equal_run,
)
from solver.chain.nested_reversal_levels import Arrival, Levels, Programs, Stretch, divide
from solver.methods.revolve import reversal_to_schedule
from solver.schedule import simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.synthetic_graphs import random_dag


def tiny_chain(rng: random.Random) -> Graph:
    """Up to five ops in a row, some of them with a skip over one, of like or unlike sizes."""
    tape, alike = Tape(backward_ratio=1.0), rng.random() < 0.5
    xs = [tape.input("x", rng.choice([1, 4]))]
    for i in range(rng.randint(2, 5)):
        skip = xs[-2:-1] if len(xs) > 2 and rng.random() < 0.25 else []
        size_bytes = 4 if alike and rng.random() < 0.7 else rng.randint(1, 5)
        x = tape.op(
            f"f{i}",
            [xs[-1], *skip],
            size_bytes,
            rng.choice([1.0, 1.0, 2.0, 5.0]),
            workspace_bytes=rng.choice([0, 0, 1, 3]),
            saves_inputs=rng.random() < 0.9,
            saves_output=rng.random() < 0.3,
        )
        xs.append(x)
    return tape.graph(tape.op("loss", [xs[-1]], 1, 0.5))


def tiny_cells(rng: random.Random) -> Graph:
    """Two or three recurrent steps with one state or two, and gates that backward reads."""
    tape = Tape(backward_ratio=1.0)
    n_states, n_cells = rng.choice([(1, 2), (1, 3), (2, 2)])
    size_bytes = rng.choice([2, 3, 4])
    states = [tape.input(f"x{i}", rng.choice([1, size_bytes])) for i in range(n_states)]
    for cell in range(n_cells):
        gates_bytes, time_s = rng.choice([1, size_bytes, 2 * size_bytes]), rng.choice([1.0, 2.0])
        gates = tape.op(f"g{cell}", states, gates_bytes, time_s, saves_inputs=rng.random() < 0.5)
        states = [
            tape.op(
                f"h{cell}{i}",
                [gates, *([state] if rng.random() < 0.5 else [])],
                size_bytes,
                rng.choice([0.5, 1.0, 3.0]),
                saves_inputs=rng.random() < 0.7,
                saves_output=rng.random() < 0.3,
            )
            for i, state in enumerate(states)
        ]
    return tape.graph(tape.op("loss", states, 1, 0.5))


def tiny(seed: int) -> Graph:
    rng = random.Random(seed)
    if seed % 4 == 1:
        return tiny_cells(rng)
    if seed % 3:
        return tiny_chain(rng)
    return random_dag(seed=seed, n_forward=rng.randint(3, 6), n_later=rng.randint(2, 4))


def divisions(folded: StorageGraph, budget_bytes: int, rng: random.Random) -> Iterator[Levels]:
    """Levels with bounds, checks and widths at random."""
    n_forward, n_later = folded.n_forward, folded.n_nodes - folded.n_forward
    for _ in range(12):
        n = rng.randint(2, 5)
        if n > min(n_forward, n_later):
            continue
        checks = rng.sample(range(n_forward, folded.n_nodes), n)
        levels = divide(
            folded,
            bounds=sorted(rng.sample(range(n_forward + 1), n + 1)),
            checks=sorted(checks, reverse=True),
            width_bytes=rng.choice([1, 2, 3, 4, 5, 8]),
            budget_bytes=budget_bytes,
        )
        if levels is not None:
            yield levels


def compared(seed: int) -> tuple[int, int]:
    """Ten graphs, each at its three least budgets: no division proves more than the truth.

    Returns how many prove anything, and how many the truth itself.
    """
    n_positive = n_met = 0
    for number in range(seed, seed + 10):
        graph, rng = tiny(number), random.Random(number)
        if len(graph.nodes) > 14:
            continue
        folded = StorageGraph.of(graph)
        least_bytes = least_peak_bytes(graph)
        for budget_bytes in range(least_bytes, least_bytes + 3):
            truth = fastest(graph, budget_bytes=budget_bytes)
            recomputed_s = truth.time_s - graph.baseline_time_s
            for levels in divisions(folded, budget_bytes, rng):
                proven_s = least_recompute_s(levels)
                assert proven_s <= recomputed_s + 1e-6
                run = longest_equal_run(levels)
                assert run is None or equal_bound_s(levels, run) <= proven_s + 1e-6
                n_positive += proven_s > 0
                n_met += 0 < recomputed_s <= proven_s + 1e-6
    return n_positive, n_met


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("seed", range(10, 600, 10))
def test_no_levels_prove_more_than_the_truth(seed: int) -> None:
    compared(seed)


@pytest.mark.slow
def test_some_levels_prove_the_truth_and_others_less() -> None:
    found = [compared(seed) for seed in (600, 610)]
    n_positive, n_met = map(sum, zip(*found, strict=True))
    assert n_positive > n_met > 0


@pytest.mark.parametrize("n_blocks", [5, 6])
def test_it_proves_more_than_cuts_where_a_chain_starts_again_for_every_block(n_blocks: int) -> None:
    graph = nets.chain(n_blocks=n_blocks)
    folded, blocks = StorageGraph.of(graph), split_into_blocks(graph)
    budget_bytes = least_peak_bytes(graph)
    truth = fastest(graph, budget_bytes=budget_bytes)
    proven_s = graph.baseline_time_s * (
        1 + reversal_bound(folded, blocks, budget_bytes=budget_bytes)
    )
    assert lower_bound_s(graph, budget_bytes=budget_bytes) < proven_s <= truth.time_s
    more = reversal_bound(folded, blocks, budget_bytes=budget_bytes + 1000)
    assert more < proven_s / graph.baseline_time_s - 1


def equal_levels(n_levels: int, n_slots: int) -> Levels:
    """Levels that take a second each, where so many states fit and nothing else."""
    stretch = Stretch(
        nodes=((1.0, frozenset({0}), frozenset(), frozenset()),),
        unit_bytes={0: 10**9},
        demand=frozenset({0}),
    )
    rooms = (2 * n_slots,) * n_levels
    return Levels(2, (1.0,) * n_levels, 0.0, rooms, (stretch,) * n_levels)


@pytest.mark.parametrize("n_levels", [2, 7, 20, 64])
@pytest.mark.parametrize("n_slots", [0, 1, 3, 6])
def test_equal_levels_take_nearly_what_griewank_and_walther_say(
    n_levels: int, n_slots: int
) -> None:
    """All of it without room for a state: then each level is reached from the first one."""
    levels = equal_levels(n_levels, n_slots)
    expected = n_extra_steps(n_steps=n_levels, n_snapshots=n_slots + 1)
    again = least_recompute_s(levels)
    assert (1.0 if not n_slots else 0.7) * expected <= again + 1e-9 <= expected + 2e-9
    assert equal_bound_s(levels, (1, n_levels)) == pytest.approx(again)


def cells(n_levels: int, n_slots: int) -> Levels:
    """Levels of a second each, of which nothing fits but the two bytes that the next one reads."""
    stretch = Stretch(
        nodes=(
            (1.0, frozenset({0}), frozenset(), frozenset({-1})),
            (0.0, frozenset({1}), frozenset({0}), frozenset({-1})),
        ),
        unit_bytes={0: 10**9, 1: 2},
        demand=frozenset({0}),
    )
    arrival = Arrival((1.0,) * n_levels, 0.0, (False,) * n_levels, (True,) * n_levels)
    rooms = (2 * n_slots,) * n_levels
    return Levels(2, (1.0,) * n_levels, 0.0, rooms, (stretch,) * n_levels, arrival)


@pytest.mark.parametrize("n_levels", [2, 7, 20, 64])
@pytest.mark.parametrize("n_slots", [0, 1, 3, 6])
def test_where_only_states_fit_it_is_what_griewank_and_walther_say(
    n_levels: int, n_slots: int
) -> None:
    levels = cells(n_levels, n_slots)
    expected = n_extra_steps(n_steps=n_levels, n_snapshots=n_slots + 1)
    assert least_recompute_s(levels) == pytest.approx(expected)
    assert equal_bound_s(levels, (1, n_levels)) == pytest.approx(expected)


class Known(Programs):
    """s and s' that fall as more bytes are held, by level (a stretch without nodes)."""

    def saving_s(self, stretch: Stretch, held_bytes: int, *, unaided: bool) -> float:
        (level,) = stretch.demand
        missing = max(0, 6 - held_bytes)
        if unaided:
            return math.inf if missing > 3 else (0.5 + 0.25 * level) * missing
        return 0.25 * level * missing


def any_levels(rng: random.Random) -> Levels:
    n = rng.randint(2, 6)
    arrival = Arrival(
        forward_s=tuple(rng.choice([0.5, 1.0, 1.5]) for _ in range(n)),
        one_unit_s=rng.choice([0.0, 0.25]),
        always_due=tuple(rng.random() < 0.3 for _ in range(n)),
        due_if_read=tuple(rng.random() < 0.7 for _ in range(n)),
    )
    return Levels(
        width_bytes=2,
        forward_s=tuple(rng.choice([1.0, 2.0, 3.0]) for _ in range(n)),
        one_unit_s=rng.choice([0.0, 0.5]),
        room_bytes=tuple(rng.choice([0, 1, 2, 4, 5, 7]) for _ in range(n)),
        stretches=tuple(Stretch((), {}, frozenset({level})) for level in range(1, n + 1)),
        arrival=arrival if rng.random() < 0.9 else None,
        programs=Known(),
    )


def as_stated(levels: Levels) -> float:
    """T(0, n, 0) word for word, without tables."""
    n, w, room, arrival = levels.n_levels, levels.width_bytes, levels.room_bytes, levels.arrival

    def total(i: int, j: int, due: bool) -> float:
        of = arrival if due and arrival is not None else levels
        return max(0.0, sum(of.forward_s[i:j]) - of.one_unit_s)

    def fits(m: int, k: int, last: int) -> bool:
        return all(m <= room[t - 1] for t in range(k + 1, last + 1))

    @functools.cache
    def least(kind: str, i: int, j: int, m: int) -> float:
        """A, P, or T."""
        if i == j:
            return 0.0
        due = kind == "P"

        def first(k: int) -> float:
            return 0.0 if kind == "T" else total(i, k, due)

        found = [first(j) + least("A", i, j if due else j - 1, m)]
        for k in range(i + 1, j + due):
            if not fits(m + w, k, j + due):
                continue
            rest, held = first(k) + least(kind, k, j, m + w), room[k] - m
            before = least("A", i, k - 1, m)
            always = arrival is not None and arrival.always_due[k - 1]
            if_read = arrival is not None and (always or arrival.due_if_read[k - 1])
            arrived = least("P", i, k - 1, m) if if_read else before
            alone_s = levels.saving_s(k, held, unaided=True) + (arrived if always else before)
            found.append(rest + min(alone_s, levels.saving_s(k, held) + arrived))
            if k > i + 1:
                one = rest + levels.saving_s(k, held - w)
                other = first(k - 1) + least(kind, k - 1, j, m + w)
                found.append(before + max(one, other))
        return max(min(found), least("A", i, j, m) if due else 0.0)

    return least("T", 0, n, 0)


@pytest.mark.slow
def test_the_tables_are_the_recursion_as_it_is_stated() -> None:
    found = [(least_recompute_s(levels), as_stated(levels)) for levels in random_levels(400)]
    assert [table for table, _ in found] == pytest.approx([stated for _, stated in found])
    assert len({round(table, 3) for table, _ in found}) > 40


def random_levels(n: int) -> list[Levels]:
    return [any_levels(random.Random(seed)) for seed in range(n)]


def test_past_its_work_a_level_proves_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = nets.recurrent(n_steps=20)
    folded, blocks = StorageGraph.of(graph), split_into_blocks(graph)
    budget_bytes = simulate(graph, reversal_to_schedule(graph, blocks, 3)).peak_bytes
    proven = reversal_bound(folded, blocks, budget_bytes=budget_bytes)
    n_solved = []

    def counted(stretch: Stretch, held_bytes: int, *, unaided: bool) -> float:
        n_solved.append(len(stretch.nodes) + len(stretch.unit_bytes))
        return saving_s(stretch, held_bytes, unaided=unaided)

    saving_s = Stretch.saving_s
    monkeypatch.setattr(Stretch, "saving_s", counted)
    assert reversal_bound(folded, blocks, budget_bytes=budget_bytes) == proven
    most = sum(n_solved) // 2
    n_solved.clear()
    monkeypatch.setattr(nested_reversal_levels, "MAX_COLUMNS", most)
    less = reversal_bound(folded, blocks, budget_bytes=budget_bytes)
    assert 0 < less < proven
    assert sum(n_solved) <= most


def test_where_work_is_short_no_level_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = cells(20, 3)
    proven_s = least_recompute_s(levels)
    monkeypatch.setattr(nested_reversal_bound, "MAX_CELLS", 0)
    assert least_recompute_s(levels) == proven_s  # all levels are equal
    unlike = replace(levels, room_bytes=(*levels.room_bytes[:10], 8, *levels.room_bytes[11:]))
    less_s = least_recompute_s(unlike)
    monkeypatch.undo()
    assert 0 < less_s < least_recompute_s(unlike) < proven_s


def test_levels_in_the_wrong_order_are_refused() -> None:
    folded = StorageGraph.of(nets.chain(n_blocks=3))
    with pytest.raises(ValueError, match="descend"):
        divide(folded, bounds=(0, 1, 2), checks=(5, 6), width_bytes=1000, budget_bytes=9000)
