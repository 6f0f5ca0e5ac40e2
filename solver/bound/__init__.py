"""Lower bounds: the graph in numbers, the cut MILP, and the least time and budget it proves."""

from solver.bound.cut import TIME_ERROR, CutProgram, Cuts, solve_cuts
from solver.bound.folded import Step
from solver.bound.lower_bound import Binding, binding_cut, lower_bound_s, proven_least_budget_bytes
from solver.bound.milp import Program

__all__ = [
    "TIME_ERROR",
    "Binding",
    "CutProgram",
    "Cuts",
    "Program",
    "Step",
    "binding_cut",
    "lower_bound_s",
    "proven_least_budget_bytes",
    "solve_cuts",
]
