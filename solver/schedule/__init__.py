"""The schedule, the simulator that says what it costs, and the Solution."""

from solver.schedule.memory import (
    CATEGORIES,
    LAYERS,
    Occupancy,
    held_during,
    live_bytes_by,
    memory_at,
    node_at,
    occupancy,
    saved_for_backward,
)
from solver.schedule.ops import Compute, Free, Schedule, free_after_last_use, needs
from solver.schedule.recompute import (
    baseline,
    is_recomputable,
    keep,
    keep_order,
    lost_views,
    missing_computes,
    without_dead_computes,
)
from solver.schedule.simulator import IllegalScheduleError, Simulation, simulate
from solver.schedule.solution import (
    OPTIMAL_GAP,
    Obstacle,
    Request,
    SavedSchedule,
    Solution,
    Status,
)
