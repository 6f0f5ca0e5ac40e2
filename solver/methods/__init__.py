"""The methods by name. Each proposes a schedule; none reports a cost of its own."""

from solver.methods.ilp_stages import MissingSolverError, TooLargeError
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Method, Proposal
from solver.methods.registry import METHODS
from solver.methods.reusing import AS_IT_IS, KnownPlan, reused, transferred
from solver.methods.sqrt import segment_counts
