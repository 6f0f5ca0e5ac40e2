"""Graphs made from numbers: chains, residual nets, transformers, loops. No torch.

For tests and benchmarks. They are written as a forward pass with `Tape`, which adds a backward pass
as autograd would. The same arguments give the same graph.
"""

from __future__ import annotations

from graphs.graph import Graph
from graphs.synthetic.tape import Tape

FLOPS_PER_S, BYTES_PER_S = 4e14, 3e12


def chain(*, n_blocks: int, size_bytes: int = 1000, time_s: float = 1.0) -> Graph:
    """Equal ops in a row, each with its input saved for backward."""
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


def transformer(
    *, n_layers: int, hidden: int = 4096, n_tokens: int = 4096, n_words: int = 128256
) -> Graph:
    """A decoder in the shape of Llama: norms, rotary attention, gated feed-forward, large head.

    Attention has a quarter of the heads for keys and values. Numbers have two bytes; times are
    those of a card with FLOPS_PER_S and BYTES_PER_S.
    """
    tape = Tape()
    row_bytes, inner = 2 * n_tokens, 7 * hidden // 2  # a row: one feature of all tokens

    def linear(name: str, x: str, n_in: int, n_out: int) -> str:
        time_s = 2 * n_tokens * n_in * n_out / FLOPS_PER_S
        return tape.op(name, [x], row_bytes * n_out, time_s, parameter_bytes=n_in * n_out * 2)

    def pointwise(name: str, inputs: list[str], width: int, *, saves: bool = False) -> str:
        time_s = (1 + len(inputs)) * row_bytes * width / BYTES_PER_S
        return tape.op(name, inputs, row_bytes * width, time_s, saves_inputs=saves)

    def norm(name: str, x: str) -> str:
        """RMSNorm in double width, as the transformers library writes it."""
        size_bytes = row_bytes * hidden
        time_s = 2 * size_bytes / BYTES_PER_S
        wide = pointwise(f"{name}.to", [x], 2 * hidden)
        square = pointwise(f"{name}.square", [wide], 2 * hidden, saves=True)
        scale = tape.op(f"{name}.rsqrt", [square], 4 * n_tokens, time_s)
        wide = tape.op(f"{name}.mul", [wide, scale], 2 * size_bytes, 2 * time_s)
        return tape.op(f"{name}.scale", [wide], size_bytes, time_s, parameter_bytes=hidden * 2)

    tokens, size_bytes = tape.input("tokens", 8 * n_tokens), row_bytes * hidden
    time_s = 2 * size_bytes / BYTES_PER_S
    x = tape.op("embed", [tokens], size_bytes, time_s, parameter_bytes=n_words * hidden * 2)
    for i in range(n_layers):
        h = norm(f"{i}.norm1", x)
        q = linear(f"{i}.q", h, hidden, hidden)
        k, v = (linear(f"{i}.{name}", h, hidden, hidden // 4) for name in "kv")
        q = pointwise(f"{i}.rotate_q", [q], hidden)
        k = pointwise(f"{i}.rotate_k", [k], hidden // 4)
        sizes = (size_bytes, 4 * n_tokens * 32)
        time_s = 2 * n_tokens * n_tokens * hidden / FLOPS_PER_S
        a = tape.op(f"{i}.attention", [q, k, v], sizes, time_s, saves_output=True)
        x = pointwise(f"{i}.add1", [x, linear(f"{i}.o", a, hidden, hidden)], hidden)
        h = norm(f"{i}.norm2", x)
        gate, up = (linear(f"{i}.{name}", h, hidden, inner) for name in ("gate", "up"))
        gate = pointwise(f"{i}.silu", [gate], inner, saves=True)
        product = pointwise(f"{i}.mul", [gate, up], inner, saves=True)
        x = pointwise(f"{i}.add2", [x, linear(f"{i}.down", product, inner, hidden)], hidden)
    logits = pointwise("logits", [linear("head", norm("norm", x), hidden, n_words)], 2 * n_words)
    wide_bytes = 2 * row_bytes * n_words
    # like relu, log_softmax saves its result and not its input
    soft = tape.relu("log_softmax", logits, wide_bytes, 2 * wide_bytes / BYTES_PER_S)
    return tape.graph(tape.op("loss", [soft], 4, 1e-6, saves_inputs=False))


def recurrent(*, n_steps: int, state_bytes: int = 1 << 16, n_cell_ops: int = 6) -> Graph:
    """A loop of cells: a few ops per step on a hidden state that is carried along."""
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
