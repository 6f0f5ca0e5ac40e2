"""The answer: a schedule within a budget in bytes, judged and with its proof. Imports no torch."""

from solver.schedule import Compute, Free, Schedule
from solver.simulate import IllegalScheduleError, Trace, simulate
from solver.solution import Request, Solution
from solver.solve import solve

__all__ = [
    "Compute",
    "Free",
    "IllegalScheduleError",
    "Request",
    "Schedule",
    "Solution",
    "Trace",
    "simulate",
    "solve",
]
