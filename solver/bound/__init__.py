"""Lower bounds on time and budget: the graph as numbered storages, and the cut MILPs on it."""

from solver.bound.copies import CopyMilp
from solver.bound.cut import TIME_ERROR, CutMilp, Cuts, solve_cuts
from solver.bound.in_flight import (
    Span,
    halves,
    least_in_flight_bytes,
    span_graph,
    whole_span,
    without_span_nodes,
)
from solver.bound.in_flight_cuts import SpanCut, bound_by_lps, bound_by_milp
from solver.bound.lower_bound import (
    Binding,
    CopyBinding,
    binding_copy_cut,
    binding_cut,
    least_time_s,
    lower_bound_s,
    proven_least_budget_bytes,
    relaxed_bound,
)
from solver.bound.milp import Milp
from solver.bound.rank_cuts import RankCuts, one_in_flight
from solver.bound.rounded_byte_rows import add_rounded_byte_rows
from solver.bound.scip import has_scip, solve_by_scip
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import WindowCuts, large_units_only, lost_share_by_windows, spread_out
