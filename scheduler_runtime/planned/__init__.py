"""A module with a plan: one program for each kind of call, guards, mismatches, replanning."""

from scheduler_runtime.planned.existing_gradients import warn_of_existing
from scheduler_runtime.planned.forward import PlannedForward, refuse_second
from scheduler_runtime.planned.mismatch import (
    Difference,
    PlanMismatchError,
    check_arguments,
    difference,
    difference_of_bits,
    values_difference,
)
from scheduler_runtime.planned.passes_in_flight import PassesInFlight, PlannedPass, n_planned_passes
from scheduler_runtime.planned.plan import AnyPlan, Plan, check_module, check_order
from scheduler_runtime.planned.planning import NewPlan, new_plan
from scheduler_runtime.planned.program_cache import ProgramCache
from scheduler_runtime.planned.replan_warning import plan_summary, warn_of_another_plan
from scheduler_runtime.planned.replanning import ReplanError, replan
from scheduler_runtime.planned.same_plan_on_ranks import Ranks, RanksDisagreeError
