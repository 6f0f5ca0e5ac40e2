"""Graphs made from numbers: chains, residual nets, transformers, loops. No torch.

For tests and benchmarks. They are written as a forward pass with `Tape`, which adds a backward pass
as autograd would. The same arguments give the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphs.graph import Graph
from graphs.synthetic.tape import Tape


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
    *,
    n_layers: int,
    hidden: int = 4096,
    n_tokens: int = 4096,
    n_words: int = 128256,
    element_bytes: int = 2,
    flops_per_s: float = 4e14,
    bytes_per_s: float = 3e12,
) -> Graph:
    """A decoder in the shape of Llama: norms, rotary attention, gated feed-forward, large head."""
    decoder = _Decoder(Tape(), hidden, n_tokens, element_bytes, flops_per_s, bytes_per_s)
    x = decoder.embedding(n_words)
    for i in range(n_layers):
        x = decoder.attention(f"{i}", x)
        x = decoder.feed_forward(f"{i}", x)
    return decoder.tape.graph(decoder.loss(x, n_words))


@dataclass(frozen=True)
class _Decoder:
    """The parts of `transformer`. Arguments and results are names of tensors of the tape."""

    tape: Tape
    hidden: int
    n_tokens: int
    element_bytes: int
    flops_per_s: float
    bytes_per_s: float

    @property
    def row_bytes(self) -> int:
        """Bytes of one feature of all tokens."""
        return self.n_tokens * self.element_bytes

    def linear(self, name: str, x: str, n_in: int, n_out: int) -> str:
        """A product with a weight matrix."""
        time_s = 2 * self.n_tokens * n_in * n_out / self.flops_per_s
        weight_bytes = n_in * n_out * self.element_bytes
        return self.tape.op(name, [x], self.row_bytes * n_out, time_s, parameter_bytes=weight_bytes)

    def pointwise(self, name: str, inputs: list[str], width: int, *, saves: bool = True) -> str:
        size_bytes = self.row_bytes * width
        time_s = (1 + len(inputs)) * size_bytes / self.bytes_per_s
        return self.tape.op(name, inputs, size_bytes, time_s, saves_inputs=saves)

    def norm(self, name: str, x: str) -> str:
        """RMSNorm in double width, as the transformers library writes it."""
        size_bytes = self.row_bytes * self.hidden
        time_s = 2 * size_bytes / self.bytes_per_s
        wide = self.pointwise(f"{name}.to", [x], 2 * self.hidden, saves=False)
        square = self.pointwise(f"{name}.square", [wide], 2 * self.hidden)
        scale = self.tape.op(f"{name}.rsqrt", [square], 4 * self.n_tokens, time_s)
        wide = self.tape.op(f"{name}.mul", [wide, scale], 2 * size_bytes, 2 * time_s)
        weight_bytes = self.hidden * self.element_bytes
        return self.tape.op(
            f"{name}.scale", [wide], size_bytes, time_s, parameter_bytes=weight_bytes
        )

    def embedding(self, n_words: int) -> str:
        size_bytes = self.row_bytes * self.hidden
        return self.tape.op(
            "embed",
            [self.tape.input("tokens", 8 * self.n_tokens)],
            size_bytes,
            2 * size_bytes / self.bytes_per_s,
            parameter_bytes=n_words * self.hidden * self.element_bytes,
        )

    def attention(self, layer: str, x: str) -> str:
        """The attention half of a layer, with a quarter of the heads for keys and values."""
        hidden = self.hidden
        h = self.norm(f"{layer}.norm1", x)
        q = self.linear(f"{layer}.q", h, hidden, hidden)
        k = self.linear(f"{layer}.k", h, hidden, hidden // 4)
        v = self.linear(f"{layer}.v", h, hidden, hidden // 4)
        q = self.pointwise(f"{layer}.rotate_q", [q], hidden, saves=False)
        k = self.pointwise(f"{layer}.rotate_k", [k], hidden // 4, saves=False)
        a = self.tape.op(
            f"{layer}.attention",
            [q, k, v],
            (self.row_bytes * hidden, 4 * self.n_tokens * 32),
            2 * self.n_tokens * self.n_tokens * hidden / self.flops_per_s,
            saves_output=True,
        )
        o = self.linear(f"{layer}.o", a, hidden, hidden)
        return self.pointwise(f"{layer}.add1", [x, o], hidden, saves=False)

    def feed_forward(self, layer: str, x: str) -> str:
        """The gated half of a layer."""
        hidden, inner = self.hidden, 7 * self.hidden // 2
        h = self.norm(f"{layer}.norm2", x)
        gate = self.linear(f"{layer}.gate", h, hidden, inner)
        up = self.linear(f"{layer}.up", h, hidden, inner)
        gate = self.pointwise(f"{layer}.silu", [gate], inner)
        product = self.pointwise(f"{layer}.mul", [gate, up], inner)
        down = self.linear(f"{layer}.down", product, inner, hidden)
        return self.pointwise(f"{layer}.add2", [x, down], hidden, saves=False)

    def loss(self, x: str, n_words: int) -> str:
        logits = self.linear("head", self.norm("norm", x), self.hidden, n_words)
        wide = self.pointwise("logits", [logits], 2 * n_words, saves=False)
        size_bytes = self.row_bytes * n_words
        # like relu, log_softmax saves its result and not its input
        soft = self.tape.relu(
            "log_softmax", wide, 2 * size_bytes, 4 * size_bytes / self.bytes_per_s
        )
        return self.tape.op("loss", [soft], 4, 1e-6, saves_inputs=False)


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
