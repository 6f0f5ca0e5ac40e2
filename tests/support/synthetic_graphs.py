"""More synthetic graphs: transformers, U-shapes, pyramids, dense blocks, random DAGs.

`random_dag` makes small irregular graphs with everything that the file format allows. The same
arguments give the same graph.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from graphs.graph import Graph, Node, Phase, Tensor
from graphs.synthetic.nets import chain, recurrent, residual
from graphs.synthetic.tape import Tape
from tests.support.aliasing import aliasing_dag
from tests.support.overwriting import overwriting_dag

__all__ = [
    "chain",
    "dense",
    "pyramid",
    "random_dag",
    "recurrent",
    "residual",
    "some_graph",
    "some_not_copyable",
    "transformer",
    "u_shape",
]

FLOPS_PER_S, BYTES_PER_S = 4e14, 3e12


def transformer(
    *, n_layers: int, hidden: int = 4096, n_tokens: int = 4096, n_words: int = 128256
) -> Graph:
    """A decoder in the shape of Llama: norms, rotary attention, gated feed-forward, large head.

    Keys and values have a quarter of the heads. Numbers have two bytes. Times are those of a GPU
    with FLOPS_PER_S and BYTES_PER_S.
    """
    tape = Tape()
    row_bytes, inner = 2 * n_tokens, 7 * hidden // 2  # row_bytes: one feature of all tokens

    def linear(name: str, x: str, n_in: int, n_out: int) -> str:
        time_s = 2 * n_tokens * n_in * n_out / FLOPS_PER_S
        return tape.op(name, [x], row_bytes * n_out, time_s, parameter_bytes=n_in * n_out * 2)

    def pointwise(name: str, inputs: list[str], width: int, *, saves: bool = False) -> str:
        time_s = (1 + len(inputs)) * row_bytes * width / BYTES_PER_S
        return tape.op(name, inputs, row_bytes * width, time_s, saves_inputs=saves)

    def norm(name: str, x: str) -> str:
        """RMSNorm in float32, as the transformers library writes it."""
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


def u_shape(*, depth: int = 5, n_convs: int = 2, width_bytes: int = 64 << 20) -> Graph:
    """A U-Net: each level halves the image side and doubles the channels, with skip connections."""
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
    """Stages of bottleneck blocks, each with half of the bytes, as in ResNet-50 (the default)."""
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


def random_dag(*, seed: int, n_forward: int, n_later: int) -> Graph:
    """A small irregular graph: skips, nodes with several outputs or none, views, zero sizes and
    times, ops that cannot be recomputed, workspace, graph outputs from the forward pass. Sizes and
    times are whole numbers.
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


def some_not_copyable(graph: Graph, *, seed: int) -> Graph:
    """The graph, with about a tenth of its storages not copyable."""
    rng = random.Random(f"not copyable {seed}")
    tensors = tuple(replace(tensor, copyable=rng.random() < 0.9) for tensor in graph.tensors)
    return replace(graph, tensors=tensors)


def some_graph(seed: int) -> Graph:
    """A small graph: plain, with overwrites or with aliases, by turns."""
    if seed % 3 == 0:
        return random_dag(seed=seed, n_forward=seed % 8 + 3, n_later=seed % 7 + 2)
    return overwriting_dag(seed) if seed % 3 == 1 else aliasing_dag(seed)


def _pick_inputs(rng: random.Random, tensors: list[Tensor], *, recent: bool) -> tuple[str, ...]:
    n_inputs = rng.choice((1, 1, 2, 2, 3))
    chosen = [tensors[-1]] if recent else []
    chosen += [rng.choice(tensors) for _ in range(n_inputs)]
    return tuple(dict.fromkeys(tensor.name for tensor in chosen[:n_inputs]))


def _view(rng: random.Random, i: int, of: str, phase: Phase, tensors: list[Tensor]) -> Node:
    """A node that makes a view of an input, without bytes or cost; sometimes not recomputable."""
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
