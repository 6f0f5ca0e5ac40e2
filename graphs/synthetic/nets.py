"""Synthetic graphs for tests and benchmarks: chains, residual nets, loops. Imports no torch.

Each records a forward pass on a `Tape`, which adds a backward pass as autograd would. The same
arguments give the same graph.
"""

from __future__ import annotations

from graphs.graph import Graph
from graphs.synthetic.tape import Tape


def chain(*, n_blocks: int, size_bytes: int = 1000, time_s: float = 1.0) -> Graph:
    """A chain of equal ops, each of which saves its input for backward."""
    tape = Tape(backward_ratio=1.0)
    x = tape.input("x", size_bytes)
    for i in range(n_blocks):
        x = tape.op(f"f{i}", [x], size_bytes, time_s)
    return tape.graph(tape.op("loss", [x], 4, 0.0))


def residual(*, n_blocks: int, width_bytes: int = 1 << 20) -> Graph:
    """Blocks of norm, conv, relu, conv with a skip connection, all of the same width."""
    tape = Tape()
    x = tape.op("stem", [tape.input("x", width_bytes)], width_bytes, 1e-4)
    for i in range(n_blocks):
        h = tape.op(f"{i}.norm", [x], (width_bytes, 4096), 1e-5)
        h = tape.op(f"{i}.conv1", [h], width_bytes, 9e-5, parameter_bytes=65536)
        h = tape.relu(f"{i}.relu", h, width_bytes, 5e-6)
        h = tape.op(f"{i}.conv2", [h], width_bytes, 9e-5, parameter_bytes=65536)
        x = tape.op(f"{i}.add", [x, h], width_bytes, 8e-6, saves_inputs=False)
    return tape.graph(tape.op("loss", [x], 4, 1e-6))


def recurrent(*, n_steps: int, state_bytes: int = 1 << 16, n_cell_ops: int = 6) -> Graph:
    """A recurrent net: `n_cell_ops` ops per step, on the hidden state of the step before."""
    tape = Tape()
    x = tape.input("x", state_bytes * n_steps)
    state = tape.op("start", [x], state_bytes, 1e-6)
    for i in range(n_steps):
        h = tape.op(f"{i}.gates", [x, state], 4 * state_bytes, 2e-5)
        for j in range(n_cell_ops - 2):
            size = 4 * state_bytes if j == 0 else state_bytes
            h = tape.op(f"{i}.act{j}", [h], size, 2e-6, saves_output=True)
        state = tape.op(f"{i}.state", [h, state], state_bytes, 2e-6)
    return tape.graph(tape.op("loss", [state], 4, 1e-6))
