"""Integer programs solved by SCIP, which proves more of large programs of cuts than HiGHS does.

SCIP (Bolusani et al., 2024) is an optional package, `pyscipopt`. Its cuts at the root node leave
little for branching in programs with windows (`solver.bound.windows`). For the U-Net at a tenth of
its range, with eleven positions and some 3,500 columns, it proves 30.6 % in 42 s; HiGHS proves
29.3 % in 76 s. Both solve small programs at once, so only `solver.methods.auto.last_proof` uses
this file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from solver.bound.milp import Answer, Milp
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError, interruptible


def has_scip() -> bool:
    """Whether `pyscipopt` is installed and can be loaded."""
    try:
        import pyscipopt  # noqa: F401 (here: optional, and slow to import)
    except ImportError:
        return False
    return True


def solve_by_scip(
    program: Milp,
    *,
    gap: float = 0.0,
    node_limit: int | None = None,
    deadline: Deadline = NEVER,
) -> Answer:
    """Solve a MILP; the arguments are those of `Milp.solve`."""
    if deadline.left_s <= 0:
        return Answer(values=None, bound=-math.inf, timed_out=True)
    model, columns = _model_of(program)
    # Cuts off solutions in SCIP 9.2 to 10.0: 38 of 1,500 random programs of at most nine binary
    # variables got a wrong optimum, and none without it (tests/solver/bound/test_scip.py).
    model.setParam("constraints/linear/simplifyinequalities", False)
    model.setParam("misc/catchctrlc", False)  # a signal handler of its own would replace Python's
    model.setParam("limits/gap", gap)
    if node_limit is not None:
        model.setParam("limits/nodes", node_limit)
    if math.isfinite(deadline.left_s):
        model.setParam("limits/time", max(0.0, deadline.left_s))
    try:
        interruptible(model.optimizeNogil)
    except KeyboardInterrupt:
        model.interruptSolve()  # it runs in another thread
        raise
    except OutOfTimeError:
        model.interruptSolve()
        return Answer(values=None, bound=-math.inf, timed_out=True)
    status = model.getStatus()
    if status == "infeasible":
        return Answer(values=None, bound=math.inf, timed_out=False)
    values = None
    if model.getNSols():
        best = model.getBestSol()
        values = np.array([best[column] for column in columns], dtype=np.float64)
    return Answer(values=values, bound=model.getDualbound(), timed_out=status == "timelimit")


def _model_of(program: Milp) -> tuple[Any, list[Any]]:
    """The program as a SCIP model, and its variables in order."""
    from pyscipopt import Model, quicksum  # here: optional, and slow to import

    model = Model()
    model.hideOutput()
    columns = [
        model.addVar(vtype="I" if integer else "C", lb=least, ub=most)
        for integer, least, most in zip(program.integer, program.least, program.most, strict=True)
    ]
    for row, values, lower, upper in program.rows():
        total = quicksum(v * columns[column] for v, column in zip(values, row, strict=True))
        if lower == upper:
            model.addCons(total == lower)
            continue
        if not math.isinf(lower):
            model.addCons(total >= lower)
        if not math.isinf(upper):
            model.addCons(total <= upper)
    costs = zip(program.cost, columns, strict=True)
    model.setObjective(quicksum(cost * column for cost, column in costs if cost) + program.constant)
    return model, columns
