"""SCIP in place of HiGHS: the same answers, and it stops when it should."""

import itertools
import math
import random
import signal
import time

import pytest

from solver.bound import Milp, solve_by_scip
from solver.sizes_deadlines_progress import Deadline

pytest.importorskip("pyscipopt")


def random_program(rng: random.Random) -> Milp:
    """Some random rows over at most nine binary columns; now and then no values satisfy them."""
    program = Milp(constant=1.0)
    columns = [program.variable(cost=rng.uniform(0.0, 2.0)) for _ in range(rng.randint(1, 9))]
    for _ in range(rng.randint(1, 4)):
        values = [rng.choice((0.0, 1.0, 2.0, 3.5)) for _ in columns]
        program.row(columns, values, lower=rng.uniform(0.0, 3.0), upper=rng.choice((4.0, math.inf)))
    program.row(columns, [1.0] * len(columns), upper=0.7 * len(columns))
    return program


def least_cost(program: Milp) -> float:
    """By trying all values."""
    least = math.inf
    for values in itertools.product((0.0, 1.0), repeat=len(program.cost)):
        totals = [
            sum(v * values[column] for v, column in zip(row_values, columns, strict=True))
            for columns, row_values, _, _ in program.rows()
        ]
        limits = [(lower, upper) for _, _, lower, upper in program.rows()]
        if all(lo <= total <= hi for total, (lo, hi) in zip(totals, limits, strict=True)):
            cost = sum(c * v for c, v in zip(program.cost, values, strict=True))
            least = min(least, program.constant + cost)
    return least


def market_split() -> Milp:
    """Equations between random sums, on which branch and bound takes hours (Cornuéjols 1998)."""
    rng, program = random.Random(0), Milp()
    columns = [program.variable() for _ in range(50)]
    for _ in range(6):
        values = [float(rng.randrange(100)) for _ in columns]
        slack = [program.variable(cost=1.0, most=math.inf, integer=False) for _ in range(2)]
        half = float(sum(values) // 2)
        program.row([*columns, *slack], [*values, 1.0, -1.0], lower=half, upper=half)
    return program


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(10))
def test_it_proves_the_least_cost(seed: int) -> None:
    """With SCIP's own settings, one in forty of these programs gets a wrong optimum."""
    rng, n_infeasible = random.Random(seed), 0
    for _ in range(150):
        program = random_program(rng)
        answer, truth = solve_by_scip(program), least_cost(program)
        assert answer.bound == pytest.approx(truth, abs=1e-6)
        assert (answer.values is None) == math.isinf(truth)
        assert not answer.timed_out
        n_infeasible += math.isinf(truth)
    assert 10 < n_infeasible < 140


def test_a_deadline_ends_it_with_a_bound() -> None:
    program = market_split()
    at_once = solve_by_scip(program, deadline=Deadline.after(0.0))
    assert at_once.timed_out
    assert at_once.bound == -math.inf
    # less than a second, which is not extended: `tests/support/time_limits.py`
    soon = solve_by_scip(program, deadline=Deadline.after(0.9))
    assert soon.timed_out
    assert soon.bound < 1.0


def test_ctrl_c_ends_it() -> None:
    """SCIP's own handler would end the solver, and hide from Python that it was pressed."""
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    began_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_by_scip(market_split(), deadline=Deadline.after(50.0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < 40.0
