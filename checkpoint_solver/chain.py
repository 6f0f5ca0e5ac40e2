"""Graphs as chains of blocks, and exact solvers for chains (from `solver.chain`)."""

from solver.chain import (
    Chain,
    Level,
    cost_of,
    disk_revolve,
    hrevolve,
    multistage,
    n_extra_steps,
    periodic_disk_revolve,
    reversal,
    simulate_chain,
    solve_chain,
    split_into_blocks,
    to_chain,
)

__all__ = [
    "Chain",
    "Level",
    "cost_of",
    "disk_revolve",
    "hrevolve",
    "multistage",
    "n_extra_steps",
    "periodic_disk_revolve",
    "reversal",
    "simulate_chain",
    "solve_chain",
    "split_into_blocks",
    "to_chain",
]
