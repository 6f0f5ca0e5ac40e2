"""A graph as a chain of blocks, and exact solvers for chains (rotor, binomial, levels)."""

from solver.chain.binomial import Action, n_extra_steps, reversal
from solver.chain.blocks import Blocks, checkpoints, computing_blocks, split_into_blocks
from solver.chain.from_graph import constant_bytes, room_bytes, to_chain
from solver.chain.levels import (
    Level,
    cost_of,
    disk_revolve,
    hrevolve,
    multistage,
    periodic_disk_revolve,
)
from solver.chain.nested_reversal_bound import reversal_bound
from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingOutput,
    ops_keeping_everything,
    simulate_chain,
)
from solver.chain.rotor import solve_chain
from solver.chain.to_schedule import chain_to_schedule, reversal_ops
