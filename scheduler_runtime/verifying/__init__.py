"""Verify a plan: run one training step with and without it on this machine, and compare them."""

from scheduler_runtime.verifying.both_steps import differences, run_both_steps
from scheduler_runtime.verifying.entry_point import verify
