"""A graph as a chain of blocks, and exact solvers for chains, of `solver.chain`."""

from solver.chain import (
    Chain,
    n_extra_steps,
    reversal,
    simulate_chain,
    solve_chain,
    split_into_blocks,
    to_chain,
)

__all__ = [
    "Chain",
    "n_extra_steps",
    "reversal",
    "simulate_chain",
    "solve_chain",
    "split_into_blocks",
    "to_chain",
]
