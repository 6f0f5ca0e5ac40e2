"""The methods by name, and what they share.

A method only proposes a schedule; the simulator decides what it costs and whether it fits.
"""

from solver.methods.auto import fold_simulation, schedule_from_cuts
from solver.methods.ilp_variables import MissingSolverError, TooLargeError
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Method, Proposal
from solver.methods.registry import METHODS
from solver.methods.reuse_known_plan import (
    WITHOUT_RECOMPUTATION,
    KnownPlan,
    reuse_plan,
    transfer_schedule,
)
from solver.methods.sqrt import segment_counts
