"""A graph as a chain of blocks, and exact solvers for chains (rotor, binomial)."""

from solver.chain.binomial import n_extra_steps, schedule
from solver.chain.blocks import Blocks, checkpoints, cut
from solver.chain.from_graph import constant_bytes, to_chain
from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
    keeping_everything,
    replay,
)
from solver.chain.rotor import solve_chain
from solver.chain.to_schedule import Playback

__all__ = [
    "Backward",
    "Blocks",
    "Chain",
    "ChainOp",
    "ForwardKeepingAll",
    "ForwardKeepingInput",
    "ForwardKeepingOutput",
    "Playback",
    "checkpoints",
    "constant_bytes",
    "cut",
    "keeping_everything",
    "n_extra_steps",
    "replay",
    "schedule",
    "solve_chain",
    "to_chain",
]
