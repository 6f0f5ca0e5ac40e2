"""The dynamic program against published optima, brute force, and closed forms."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.chain import rotor as dp
from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
    IllegalChainError,
    ops_keeping_everything,
    simulate_chain,
)
from solver.chain.rotor import solve_chain
from tests.support.brute_force_chains import brute_force, plain_recurrence
from tests.support.paths import DATA

PUBLISHED = json.loads((DATA / "rotor_author_tests.json").read_text())


def added(sizes: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(sizes, more, strict=True)))


def random_chain(rng: random.Random, *, n_blocks: int, largest: int = 6) -> Chain:
    """Small integers, zero among them."""

    def sizes(n: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, largest) for _ in range(n))

    input_bytes = sizes(n_blocks + 1)
    return Chain(
        forward_s=tuple(rng.randint(0, 9) for _ in range(n_blocks)),
        backward_s=tuple(rng.randint(0, 9) for _ in range(n_blocks + 1)),
        input_bytes=input_bytes,
        saved_bytes=added(input_bytes, sizes(n_blocks + 1)),
        forward_workspace_bytes=sizes(n_blocks),
        backward_workspace_bytes=sizes(n_blocks + 1),
    )


def uniform(n_blocks: int, *, saved_bytes: int = 3) -> Chain:
    return Chain(
        forward_s=(1,) * n_blocks,
        backward_s=(*(2,) * n_blocks, 0),
        input_bytes=(1,) * (n_blocks + 1),
        saved_bytes=(saved_bytes,) * (n_blocks + 1),
        forward_workspace_bytes=(0,) * n_blocks,
        backward_workspace_bytes=(0,) * (n_blocks + 1),
    )


def unbounded_peak(chain: Chain) -> int:
    return simulate_chain(chain, ops_keeping_everything(chain))[1]


@pytest.mark.parametrize(
    ("entry", "test"),
    [
        pytest.param(entry, test, id=f"{entry['name']}-{test[0]}")
        for entry in PUBLISHED["chains"]
        for test in entry["tests"]
    ],
)
def test_published_optima(entry: dict[str, Any], test: tuple[int, int | None, int | None]) -> None:
    """Operations are counted as the authors do: forwards, backwards, and the loss as one."""
    budget_bytes, n_ops, cost_s = test
    chain = Chain(*(entry[name] for name in ("fw", "bw", "cw", "cbw", "fwd_tmp", "bwd_tmp")))
    solution = solve_chain(chain, budget_bytes=budget_bytes)
    if n_ops is None:
        assert solution is None
        return
    assert (len(solution.ops), solution.cost_s) == (n_ops, cost_s)
    assert solution.peak_bytes <= budget_bytes


def budgets(rng: random.Random, chain: Chain, *, n: int) -> list[int]:
    peak_bytes = unbounded_peak(chain)
    return [rng.randint(peak_bytes // 2, peak_bytes) for _ in range(n)]


@pytest.mark.slow(sample=50)
@pytest.mark.parametrize("seed", range(250))
def test_equals_brute_force_over_persistent_schedules(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, n_blocks=seed % 5 + 1)
    for budget_bytes in budgets(rng, chain, n=3):
        truth_s, ops = brute_force(chain, budget_bytes=budget_bytes, persistent=True)
        solution = solve_chain(chain, budget_bytes=budget_bytes)
        assert (math.inf if solution is None else solution.cost_s) == truth_s
        if solution is not None:
            assert solution.peak_bytes <= budget_bytes
            cost_s, peak_bytes = simulate_chain(chain, ops)
            assert cost_s == truth_s
            assert peak_bytes <= budget_bytes


@pytest.mark.slow(sample=30)
@pytest.mark.parametrize("seed", range(60))
def test_never_below_brute_force_over_all_schedules(seed: int) -> None:
    rng = random.Random(1000 + seed)
    chain = random_chain(rng, n_blocks=seed % 4 + 2 if seed < 56 else 5)
    (budget_bytes,) = budgets(rng, chain, n=1)
    truth_s, ops = brute_force(chain, budget_bytes=budget_bytes, persistent=False)
    solution = solve_chain(chain, budget_bytes=budget_bytes)
    assert (math.inf if solution is None else solution.cost_s) >= truth_s
    if ops:
        cost_s, peak_bytes = simulate_chain(chain, ops)
        assert cost_s == truth_s
        assert peak_bytes <= budget_bytes


@cache
def fewest_advances(n_steps: int, n_snapshots: int) -> int:
    """Forward steps that save nothing when equal steps are reversed (Griewank & Walther 2000)."""
    if n_steps == 1:
        return 0
    if n_snapshots == 1:
        return n_steps * (n_steps - 1) // 2
    return min(
        split
        + fewest_advances(n_steps - split, n_snapshots - 1)
        + fewest_advances(split, n_snapshots)
        for split in range(1, n_steps)
    )


@pytest.mark.slow(sample=15)
@pytest.mark.parametrize("n_blocks", [1, 2, 3, 5, 10, 17, 30])
@pytest.mark.parametrize("n_snapshots", [1, 2, 3, 4, 8])
def test_equals_revolve_where_only_inputs_can_be_kept(n_blocks: int, n_snapshots: int) -> None:
    """No two blocks fit that saved everything. One does, beside its input, the gradients of its
    input and of its output, and the snapshots."""
    chain = uniform(n_blocks, saved_bytes=100)
    solution = solve_chain(chain, budget_bytes=n_snapshots + 1 + 2 + 100)
    once_s = sum(chain.forward_s) + sum(chain.backward_s)
    assert solution.cost_s == once_s + fewest_advances(n_blocks, n_snapshots)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(("seed", "n_blocks"), [(0, 70), (1, 100), (2, 130), (3, 170)])
def test_long_chains_equal_the_plain_recurrence(seed: int, n_blocks: int) -> None:
    """What is ruled out without a look must not have been better."""
    rng = random.Random(seed)
    chain = random_chain(rng, n_blocks=n_blocks, largest=seed % 3 + 1)
    for share in (0.1, 0.4):
        budget_bytes = int(share * unbounded_peak(chain))
        expected_s = plain_recurrence(chain, budget_bytes=budget_bytes)
        solution = solve_chain(chain, budget_bytes=budget_bytes)
        assert (math.inf if solution is None else solution.cost_s) == expected_s


def test_more_bytes_never_cost_more() -> None:
    rng = random.Random(7)
    chain = random_chain(rng, n_blocks=12)
    peak_bytes = unbounded_peak(chain)
    found = [solve_chain(chain, budget_bytes=budget) for budget in range(peak_bytes + 1)]
    costs_s = [math.inf if solution is None else solution.cost_s for solution in found]
    assert all(few >= many for few, many in pairwise(costs_s))
    assert math.isinf(costs_s[0])
    assert costs_s[-1] == sum(chain.forward_s) + sum(chain.backward_s) < costs_s[peak_bytes // 2]


def test_enough_for_everything_saves_everything() -> None:
    chain = random_chain(random.Random(1), n_blocks=6)
    peak_bytes = unbounded_peak(chain)
    for budget_bytes in (peak_bytes, 10 * peak_bytes, 10**30):
        solution = solve_chain(chain, budget_bytes=budget_bytes)
        assert solution.ops == ops_keeping_everything(chain)
        assert solution.peak_bytes == peak_bytes


def test_nothing_costs_nothing() -> None:
    chain = Chain((0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0), (0, 0, 0))
    solution = solve_chain(chain, budget_bytes=0, n_slots=1)
    assert (solution.cost_s, solution.peak_bytes) == (0.0, 0)


@pytest.mark.parametrize("unit_bytes", [1, 512, 2**20 + 7, 10**15])
def test_common_units_are_exact(unit_bytes: int) -> None:
    """Sizes in any unit, and budgets that are no multiple of it."""
    rng = random.Random(unit_bytes)
    small = random_chain(rng, n_blocks=9)

    def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size * unit_bytes for size in sizes)

    large = replace(
        small,
        input_bytes=scaled(small.input_bytes),
        saved_bytes=scaled(small.saved_bytes),
        forward_workspace_bytes=scaled(small.forward_workspace_bytes),
        backward_workspace_bytes=scaled(small.backward_workspace_bytes),
    )
    for budget in range(unbounded_peak(small) // 3, unbounded_peak(small), 3):
        expected = solve_chain(small, budget_bytes=budget)
        found = solve_chain(large, budget_bytes=(budget + 1) * unit_bytes - 1)
        assert (found is None) == (expected is None)
        assert found is None or (expected is not None and found.cost_s == expected.cost_s)


sizes = st.integers(0, 10**12)
seconds = st.floats(0, 1e6, allow_subnormal=False)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    n = draw(st.integers(1, 12))

    def of(values: st.SearchStrategy[Any], length: int) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    input_bytes = of(sizes, n + 1)
    return Chain(
        forward_s=of(seconds, n),
        backward_s=of(seconds, n + 1),
        input_bytes=input_bytes,
        saved_bytes=added(input_bytes, of(sizes, n + 1)),
        forward_workspace_bytes=of(sizes, n),
        backward_workspace_bytes=of(sizes, n + 1),
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(chains(), st.floats(0, 1.1), st.integers(1, 120))
def test_rounding_never_overruns(chain: Chain, share: float, n_slots: int) -> None:
    budget_bytes = int(share * unbounded_peak(chain))
    solution = solve_chain(chain, budget_bytes=budget_bytes, n_slots=n_slots)
    if solution is not None:
        assert solution.peak_bytes <= budget_bytes
        assert simulate_chain(chain, solution.ops) == (solution.cost_s, solution.peak_bytes)


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("seed", range(8))
def test_many_small_sizes_never_overrun(seed: int) -> None:
    """Each is less than a slot: rounded down, they would take nothing."""
    rng = random.Random(seed)
    chain = random_chain(rng, n_blocks=80, largest=rng.choice([3, 10**3, 10**9]))
    for share in (0.3, 0.6, 0.9):
        budget_bytes = int(share * unbounded_peak(chain))
        solution = solve_chain(chain, budget_bytes=budget_bytes, n_slots=40)
        assert solution is None or solution.peak_bytes <= budget_bytes


def test_slots_beyond_the_budget_fill_what_rounding_leaves_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are never needed to stay within it, and make up for rounding on the whole."""
    rng = random.Random(4)
    chains = [random_chain(rng, n_blocks=40, largest=10**6) for _ in range(10)]

    def recomputed_s() -> float:
        total_s = 0.0
        for chain in chains:
            budget_bytes = unbounded_peak(chain) // 3
            solution = solve_chain(chain, budget_bytes=budget_bytes, n_slots=100)
            assert solution.peak_bytes <= budget_bytes
            total_s += solution.cost_s - sum(chain.forward_s) - sum(chain.backward_s)
        return total_s

    with_reach_s = recomputed_s()
    monkeypatch.setattr(dp, "TABLE_PER_BUDGET", (1, 1))
    assert with_reach_s < 0.95 * recomputed_s()


def test_more_slots_come_close_to_the_optimum() -> None:
    """Sizes without a common unit, against brute force."""
    rng = random.Random(3)
    for _ in range(20):
        chain = random_chain(rng, n_blocks=4, largest=10**6)
        (budget_bytes,) = budgets(rng, chain, n=1)
        truth_s, _ = brute_force(chain, budget_bytes=budget_bytes, persistent=True)
        found = solve_chain(chain, budget_bytes=budget_bytes, n_slots=20_000)
        assert (math.inf if found is None else found.cost_s) == truth_s


@pytest.mark.parametrize("seed", range(10))
def test_single_precision_takes_integers_as_they_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, n_blocks=40)
    budget_bytes = unbounded_peak(chain) // rng.randint(2, 5)
    in_double = solve_chain(chain, budget_bytes=budget_bytes)
    monkeypatch.setattr(dp, "MAX_DOUBLE_BYTES", 0)
    in_single = solve_chain(chain, budget_bytes=budget_bytes)
    assert in_single.cost_s == in_double.cost_s


def mutants(chain: Chain, ops: tuple[ChainOp, ...]) -> Iterator[tuple[str, tuple[ChainOp, ...]]]:
    """The operations with one of them dropped, doubled, swapped with the next, or replaced."""
    for i, op in enumerate(ops):
        yield "drop", (*ops[:i], *ops[i + 1 :])
        yield "double", (*ops[: i + 1], *ops[i:])
        if i + 1 < len(ops):
            yield "swap", (*ops[:i], ops[i + 1], op, *ops[i + 2 :])
        for kind in (ForwardKeepingOutput, ForwardKeepingInput, ForwardKeepingAll, Backward):
            for block in {max(op.block - 1, 1), op.block, min(op.block + 1, chain.n_blocks)}:
                if kind(block) != op:
                    yield "replace", (*ops[:i], kind(block), *ops[i + 1 :])


@pytest.mark.parametrize("seed", range(20))
def test_the_simulator_refuses_mutants(seed: int) -> None:
    """What it lets pass still computes everything: no operation of an optimum can be missed."""
    rng = random.Random(seed)
    chain = random_chain(rng, n_blocks=8)
    chain = replace(chain, forward_s=tuple(t + 1 for t in chain.forward_s))
    n_refused, n_mutants = 0, 0
    for budget_bytes in budgets(rng, chain, n=3):
        solution = solve_chain(chain, budget_bytes=budget_bytes)
        for kind, ops in mutants(chain, solution.ops) if solution else ():
            n_mutants += 1
            try:
                cost_s, peak_bytes = simulate_chain(chain, ops)
            except IllegalChainError:
                n_refused += 1
                continue
            assert kind in ("swap", "replace")
            assert cost_s >= solution.cost_s or peak_bytes > budget_bytes
    assert n_refused > 0.8 * n_mutants > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": -1}, "budget_bytes is -1; it must be an int, 0 or more"),
        ({"budget_bytes": 7.0}, "budget_bytes is 7.0; it must be an int, 0 or more"),
        ({"budget_bytes": "7"}, "budget_bytes is '7'; it must be an int, 0 or more"),
        ({"budget_bytes": True}, "budget_bytes is True; it must be an int, 0 or more"),
        ({"budget_bytes": None}, "budget_bytes is None; it must be an int, 0 or more"),
        ({"budget_bytes": 9, "n_slots": 0}, "n_slots is 0; it must be an int, 1 or more"),
        ({"budget_bytes": 9, "n_slots": 2.5}, "n_slots is 2.5; it must be an int, 1 or more"),
        ({"budget_bytes": 9, "n_slots": False}, "n_slots is False; it must be an int, 1 or more"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_chain(uniform(3), **options)


@pytest.mark.parametrize("budget_bytes", [0, 1, 5, 6])
def test_what_fits_nowhere_is_none(budget_bytes: int) -> None:
    assert solve_chain(uniform(10), budget_bytes=budget_bytes) is None
    assert solve_chain(uniform(10), budget_bytes=budget_bytes, n_slots=1) is None
