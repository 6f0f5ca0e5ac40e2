"""The answer: a schedule within a budget in bytes, judged and with its proof. Imports no torch.

solution = solve(model, batch, budget="16GB")     # a Solution
report(solution)                                  # print it
draw(solution, "memory.png")                      # the memory over the step
draw(sweep(solution), "pareto.png")               # what other budgets cost
verify(solution, model=make_model, batch=make_batch).passed
"""

from solver.analysis import Curve
from solver.reporting import draw, report, sweep, verify
from solver.schedule import (
    Compute,
    Free,
    IllegalScheduleError,
    Request,
    Schedule,
    Simulation,
    Solution,
    simulate,
)
from solver.solving import solve

Trace = Simulation  # its former name

__all__ = [
    "Compute",
    "Curve",
    "Free",
    "IllegalScheduleError",
    "Request",
    "Schedule",
    "Simulation",
    "Solution",
    "Trace",
    "draw",
    "report",
    "simulate",
    "solve",
    "sweep",
    "verify",
]
