"""The schedule, the simulators of its time and memory, and the Solution that `solve` returns."""

from solver.schedule.copy_addresses import CopyLayout, copy_layout
from solver.schedule.host_and_disk import Link, Place, Places
from solver.schedule.memory import (
    LAYERS,
    OTHER_MICRO_BATCHES,
    Occupancy,
    copied_out_for_backward,
    held_during,
    live_bytes_by,
    memory_at,
    node_at,
    occupancy,
    saved_for_backward,
)
from solver.schedule.one_line_summary import plan_line
from solver.schedule.ops import (
    Compute,
    Copy,
    Delete,
    Drop,
    Fetch,
    Free,
    Load,
    Op,
    Schedule,
    Spill,
    Store,
    free_after_last_use,
    n_before_optimizer,
    name_in,
    ops_from_json,
    other_micro_batch_bytes,
    word_for,
)
from solver.schedule.peak_memory import STATE, PeakMemory
from solver.schedule.recompute import (
    baseline,
    is_recomputable,
    keep,
    keep_order,
    lost_views,
    missing_computes,
    without_dead_computes,
)
from solver.schedule.request import BUDGETS_OF, Obstacle, Request
from solver.schedule.reserved_memory import (
    least_capacity_bytes,
    reserved,
    reserved_by_setting,
    rounding_bytes,
)
from solver.schedule.simulator import (
    IllegalScheduleError,
    Simulation,
    Stay,
    simulate,
    simulate_if_legal,
    starts_s,
    stays,
    timeline,
)
from solver.schedule.solution import (
    OPTIMAL_GAP,
    SavedSchedule,
    Solution,
    Status,
    simulate_unplanned,
)
from solver.schedule.streams import Event
