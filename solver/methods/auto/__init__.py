"""The default method: cuts, eviction and recombination, with a proven bound."""

from solver.methods.auto.copy_placement import Gap, find_gaps, place_within_layout
from solver.methods.auto.from_cuts import fold_simulation, schedule_from_cuts
from solver.methods.auto.last_proof import prove_more
from solver.methods.auto.local_optimum import drop_recomputation
from solver.methods.auto.neighbourhoods import refine
from solver.methods.auto.stages import recompute_only
from solver.methods.auto.with_copies import recompute_and_copy
