"""Lower bounds on time and budget: the graph as numbered storages, and the cut MILPs on it."""

from solver.bound.copies import CopyCut, CopyMilp
from solver.bound.cut import TIME_ERROR, CutMilp, Cuts, solve_cuts
from solver.bound.in_flight import (
    Span,
    halves,
    least_in_flight_bytes,
    of_step,
    span_graph,
    whole_span,
)
from solver.bound.in_flight_cuts import SpanCut, bounded, sharpened
from solver.bound.lower_bound import (
    Binding,
    CopyBinding,
    binding_copies,
    binding_cut,
    least_time_s,
    lower_bound_s,
    proven_least_budget_bytes,
    relaxed_bound,
)
from solver.bound.milp import Milp
from solver.bound.rank_cuts import RankCuts, alone
from solver.bound.rounded_byte_rows import round_bytes
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import WindowCuts, large_units_only, windows_share
