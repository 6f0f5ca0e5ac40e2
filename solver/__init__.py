"""The answer: a schedule within a budget in bytes, judged and with its proof. Imports no torch.

solution = solve(model, batch, budget="16GB")     # a Solution
report(solution)                                  # print it
draw(solution, "memory.png")                      # the memory over the step
draw(sweep(solution), "pareto.png")               # what other budgets cost
verify(solution, model=make_model, batch=make_batch).passed
"""

from solver.pareto import Curve
from solver.schedule import Compute, Free, Schedule
from solver.show import draw, report, sweep, verify
from solver.simulate import IllegalScheduleError, Trace, simulate
from solver.solution import Request, Solution
from solver.solve import solve

__all__ = [
    "Compute",
    "Curve",
    "Free",
    "IllegalScheduleError",
    "Request",
    "Schedule",
    "Solution",
    "Trace",
    "draw",
    "report",
    "simulate",
    "solve",
    "sweep",
    "verify",
]
