"""Verification of a plan: one training step with and without it, compared on this machine."""

from scheduler_runtime.verifying.both_steps import differences, run_both_steps
from scheduler_runtime.verifying.entry_point import verify
