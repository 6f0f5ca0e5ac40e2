"""Graphs made from numbers: chains, residual nets, U-shapes, transformers, random DAGs. No torch.

For tests and benchmarks. Networks are written as a forward pass with `Tape`, which adds a backward
pass as autograd would; `random_dag` makes small irregular graphs with everything that the file
format allows. The same arguments give the same graph.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from graphs.graph import Graph, Node, Phase, Tensor
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


def u_shape(*, depth: int = 5, n_convs: int = 2, width_bytes: int = 64 << 20) -> Graph:
    """A U-Net: each level halves the side and doubles the channels; skip connections go across."""
    tape = Tape()
    x = tape.input("x", width_bytes // 16)
    conv_s, touch_s = 1e-3, width_bytes * 2e-12
    skips: list[str] = []

    def level(name: str, x: str, d: int) -> str:
        size, weight_bytes = width_bytes >> d, 4 * 9 * (64 << d) ** 2
        for i in range(n_convs):
            conv = f"{name}.conv{i}"
            workspace = size // 2
            x = tape.op(
                conv, [x], size, conv_s, parameter_bytes=weight_bytes, workspace_bytes=workspace
            )
            x = tape.op(f"{name}.norm{i}", [x], (size, 512 << d), touch_s / 2**d)
            x = tape.relu(f"{name}.relu{i}", x, size, touch_s / 2**d)
        return x

    for d in range(depth):
        x = level(f"down{d}", x, d)
        if d < depth - 1:
            skips.append(x)
            x = tape.op(f"pool{d}", [x], width_bytes >> (d + 2), touch_s / 2**d)
    for d in reversed(range(depth - 1)):
        weight_bytes = 4 * 4 * (64 << d) ** 2 * 2
        x = tape.op(f"up{d}", [x], width_bytes >> d, conv_s / 4, parameter_bytes=weight_bytes)
        size = 2 * (width_bytes >> d)
        x = tape.op(f"cat{d}", [skips[d], x], size, 2 * touch_s / 2**d, saves_inputs=False)
        x = level(f"out{d}", x, d)
    return tape.graph(tape.op("loss", [x], 4, touch_s))


def pyramid(*, n_blocks: Sequence[int] = (3, 4, 6, 3), width_bytes: int = 100 << 20) -> Graph:
    """Bottleneck blocks in stages that halve, as in ResNet-50 (the default) and -101."""
    tape = Tape()
    x = tape.op("stem", [tape.input("x", width_bytes // 8)], width_bytes, 2e-3)
    for s, n in enumerate(n_blocks):
        wide, narrow = (width_bytes >> s) * 2, (width_bytes >> s) // 2
        weight_bytes = (1 << 18) << (2 * s)
        for b in range(n):
            skip, name = x, f"{s}.{b}"
            for i, size in enumerate((narrow, narrow, wide)):
                x = tape.op(f"{name}.conv{i}", [x], size, 1e-3, parameter_bytes=weight_bytes)
                x = tape.op(f"{name}.norm{i}", [x], (size, 4096), size * 4e-12)
                if i < 2:
                    x = tape.relu(f"{name}.relu{i}", x, size, size * 2e-12)
            if b == 0:
                skip = tape.op(f"{name}.skip", [skip], wide, 1e-3, parameter_bytes=weight_bytes)
            x = tape.op(f"{name}.add", [skip, x], wide, wide * 3e-12, saves_inputs=False)
            x = tape.relu(f"{name}.relu2", x, wide, wide * 2e-12)
    return tape.graph(tape.op("loss", [x], 4, 1e-5))


def dense(*, n_layers: int = 24, growth_bytes: int = 4 << 20) -> Graph:
    """A dense block: each layer reads the outputs of all layers before it."""
    tape = Tape()
    found = [tape.op("stem", [tape.input("x", growth_bytes)], growth_bytes, 1e-3)]
    for i in range(n_layers):
        size = growth_bytes * len(found)
        touch_s = 2 * size / 1e12
        h = tape.op(f"{i}.cat", found, size, touch_s, saves_inputs=False)
        h = tape.op(f"{i}.norm", [h], (size, 4096), touch_s)
        h = tape.relu(f"{i}.relu", h, size, size * 2e-12)
        time_s = 1e-4 * len(found)
        found.append(tape.op(f"{i}.conv", [h], growth_bytes, time_s, parameter_bytes=1 << 16))
    return tape.graph(tape.op("loss", found, 4, 1e-6))


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


def random_dag(*, seed: int, n_forward: int, n_later: int) -> Graph:
    """A small irregular graph: skips, several outputs, views, zero sizes and times, effects, ops
    that cannot be recomputed, workspace, graph outputs from the forward pass. Whole numbers only.
    """
    rng = random.Random(seed)
    tensors = [Tensor(f"p{i}", rng.randint(0, 3), "parameter") for i in range(rng.randint(1, 2))]
    nodes: list[Node] = []
    for i in range(n_forward + n_later):
        phase: Phase = "forward" if i < n_forward else "backward"
        inputs = _pick_inputs(rng, tensors, recent=i > 0 and rng.random() < 0.7)
        if rng.random() < 0.12 and inputs:
            nodes.append(_view(rng, i, inputs[0], phase, tensors))
            continue
        n_outputs = rng.choices((0, 1, 2), weights=(1 if i else 0, 14, 4))[0]
        made = [Tensor(f"t{i}.{j}", rng.choice((0, 1, 2, 3, 4, 6))) for j in range(n_outputs)]
        if len(made) == 2 and rng.random() < 0.3:
            made[1] = Tensor(made[1].name, made[0].size_bytes, alias_of=made[0].name)
        tensors.extend(made)
        nodes.append(
            Node(
                name=f"n{i}",
                op="op",
                inputs=inputs,
                outputs=tuple(tensor.name for tensor in made),
                time_s=float(rng.choice((0, 1, 1, 2, 3, 5))),
                workspace_bytes=rng.choice((0, 0, 0, 1, 3)),
                phase=phase,
                recomputable=phase == "forward" and rng.random() < 0.88,
            )
        )
    made_names = [name for node in nodes for name in node.outputs]
    outputs = [name for name in made_names if rng.random() < 0.15]
    if made_names and made_names[-1] not in outputs:
        outputs.append(made_names[-1])
    return Graph(nodes=tuple(nodes), tensors=tuple(tensors), outputs=tuple(outputs))


def _pick_inputs(rng: random.Random, tensors: list[Tensor], *, recent: bool) -> tuple[str, ...]:
    n_inputs = rng.choice((1, 1, 2, 2, 3))
    chosen = [tensors[-1]] if recent else []
    chosen += [rng.choice(tensors) for _ in range(n_inputs)]
    return tuple(dict.fromkeys(tensor.name for tensor in chosen[:n_inputs]))


def _view(rng: random.Random, i: int, of: str, phase: Phase, tensors: list[Tensor]) -> Node:
    """A view of an input: no bytes of its own, no cost; sometimes not recomputable."""
    base = next(tensor for tensor in tensors if tensor.name == of)
    alias = Tensor(f"t{i}.view", base.size_bytes, alias_of=base.alias_of or base.name)
    tensors.append(alias)
    return Node(
        name=f"n{i}",
        op="view",
        inputs=(of,),
        outputs=(alias.name,),
        time_s=0.0,
        phase=phase,
        recomputable=phase == "forward" and rng.random() < 0.9,
    )
