"""Analyses of plans: sweeps over budgets, largest batch, pipeline stages, explanations, advice."""

from solver.plan_analysis.advice import ABOUT, Advice, advise
from solver.plan_analysis.by_block import block_names, block_rows
from solver.plan_analysis.copy_timeline import (
    TITLE_OF_STREAM,
    Copies,
    Stream,
    Trip,
    copies,
    trips_of,
)
from solver.plan_analysis.explain import (
    Peak,
    WhyRecomputed,
    most_recomputed,
    neighbours,
    peak,
    step_bytes_for,
    why_recomputed,
)
from solver.plan_analysis.largest_batch import (
    FIRST_SIZE,
    RETRY_SIZE,
    Candidate,
    SameStepError,
    Size,
    SizeNotTraceableError,
    SizeSearch,
    largest,
)
from solver.plan_analysis.pareto import N_BUDGETS, Curve, default_budgets, sweep
from solver.plan_analysis.planned_stages import micro_batch_s
from solver.plan_analysis.rank_budget import RankPlans, share_rank_budget
from solver.plan_analysis.rank_peak import rank_peak_bytes
from solver.plan_analysis.rate_shares import LARGEST_RATIO, LEAST_RATIO, overhead_range, split_s
from solver.plan_analysis.stage_split import PipelineSplit, split_pipeline
