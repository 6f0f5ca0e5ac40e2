"""What an operator call costs: seconds and workspace bytes, from a roofline or measured (and then
cached on disk)."""

from graphs.costs.cache import CostCache, circumstances
from graphs.costs.collectives import is_collective
from graphs.costs.device_memory import CudaPeaks, free_bytes
from graphs.costs.layouts import transposed_block_bytes
from graphs.costs.loops import RowLoop
from graphs.costs.memory_events import (
    begin_part,
    cpu_peak_bytes,
    cpu_peak_bytes_by_part,
    without_collector,
)
from graphs.costs.models import (
    CostModel,
    Measured,
    NodeCosts,
    Roofline,
    default_costs,
    finish_measuring,
    from_description,
    measured,
)
from graphs.costs.observed import ObservedRun, OperatorCalls, ValueReads
from graphs.costs.operators import Cost, OpCall, bytes_moved, flops_of, tensors_in
from graphs.costs.tracker import Tracker
