"""Graphs made from numbers: chains, residual nets, U-shapes, transformers, random DAGs. No torch.

For tests and benchmarks. The shapes of nets are written as a forward pass with `Tape`, which adds a
backward pass in the manner of autograd; `random_dag` makes small odd graphs with everything that
the file format allows. The same arguments give the same graph.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphs.graph import Graph, Kind, Node, Phase, Tensor


@dataclass
class Tape:
    """Records forward ops and what their backward ops read, then plays the backward pass.

    The backward of an op takes `backward_ratio` times its forward time, reads the gradients of its
    outputs and what it saved, and makes one gradient for each input that is no parameter, and one
    for each parameter (an output of the graph). Gradients that meet are added, pair by pair.
    """

    backward_ratio: float = 2.0
    add_s_per_byte: float = 1e-12
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _ops: list[_Op] = field(default_factory=list)
    _bytes: dict[str, int] = field(default_factory=dict)
    _leaves: set[str] = field(default_factory=set)

    def tensor(self, name: str, size_bytes: int, kind: Kind = "activation") -> str:
        self.tensors.append(Tensor(name, size_bytes, kind))
        self._bytes[name] = size_bytes
        return name

    def input(self, name: str, size_bytes: int) -> str:
        """A part of the batch: resident, without a gradient."""
        self._leaves.add(name)
        return self.tensor(name, size_bytes, "input")

    def op(
        self,
        name: str,
        inputs: Sequence[str],
        *,
        size_bytes: int | Sequence[int],
        time_s: float,
        parameter_bytes: int | None = None,
        saves_inputs: bool = True,
        saves_output: bool = False,
        workspace_bytes: int = 0,
        recomputable: bool = True,
        module: str = "",
    ) -> str:
        """Run an op forward; returns its first output. With more sizes, the others are saved too.

        parameter_bytes: it has a parameter of that size, whose gradient its backward makes.
        """
        sizes = [size_bytes] if isinstance(size_bytes, int) else list(size_bytes)
        outputs = [
            self.tensor(name if len(sizes) == 1 else f"{name}.{i}", size)
            for i, size in enumerate(sizes)
        ]
        read = list(inputs)
        if parameter_bytes is not None:
            read.append(self.tensor(f"{name}.weight", parameter_bytes, "parameter"))
        self.nodes.append(
            Node(
                name=name,
                op=name.rsplit(".", 1)[-1],
                inputs=tuple(read),
                outputs=tuple(outputs),
                time_s=time_s,
                workspace_bytes=workspace_bytes,
                recomputable=recomputable,
                module=module,
            )
        )
        saved = [*(read if saves_inputs else read[len(inputs) :]), *outputs[1:]]
        if saves_output:
            saved.append(outputs[0])
        self._ops.append(_Op(name, tuple(read), outputs[0], tuple(saved), time_s, workspace_bytes))
        return outputs[0]

    def graph(self, loss: str) -> Graph:
        """Play the backward pass from this tensor; the gradients of parameters are the outputs."""
        seed = self.tensor(f"grad.{loss}", self._bytes[loss], "tangent")
        gradient = {loss: seed}
        outputs = [loss]
        for op in reversed(self._ops):
            if op.output not in gradient:
                continue
            made: list[str] = []
            meeting: list[tuple[str, str]] = []
            for name in dict.fromkeys(op.inputs):
                if name in self._leaves:
                    continue
                part = f"grad.{name}" if name not in gradient else f"grad.{name}@{op.name}"
                self.tensor(part, self._bytes[name], "gradient")
                made.append(part)
                if name in gradient:
                    meeting.append((name, part))
                else:
                    gradient[name] = part
                if name.endswith(".weight"):
                    outputs.append(part)
            read = (gradient[op.output], *op.saved)
            self._later(
                f"{op.name}.backward", read, made, self.backward_ratio * op.time_s, op.workspace
            )
            for name, part in meeting:
                total = self.tensor(f"{part}+", self._bytes[name], "gradient")
                time_s = 3 * self._bytes[name] * self.add_s_per_byte
                self._later(f"{part}.add", (gradient[name], part), [total], time_s, 0)
                gradient[name] = total
        return Graph(nodes=tuple(self.nodes), tensors=tuple(self.tensors), outputs=tuple(outputs))

    def _later(
        self, name: str, read: Sequence[str], made: Sequence[str], time_s: float, workspace: int
    ) -> None:
        self.nodes.append(
            Node(
                name=name,
                op=name.rsplit(".", 1)[-1],
                inputs=tuple(dict.fromkeys(read)),
                outputs=tuple(made),
                time_s=time_s,
                workspace_bytes=workspace,
                phase="backward",
                recomputable=False,
            )
        )


@dataclass(frozen=True)
class _Op:
    name: str
    inputs: tuple[str, ...]
    output: str
    saved: tuple[str, ...]
    time_s: float
    workspace: int


def chain(*, n_blocks: int, size_bytes: int = 1000, time_s: float = 1.0) -> Graph:
    """Equal ops in a row, each with its input saved for its backward."""
    tape = Tape(backward_ratio=1.0)
    x = tape.input("x", size_bytes)
    for i in range(n_blocks):
        x = tape.op(f"f{i}", [x], size_bytes=size_bytes, time_s=time_s)
    return tape.graph(tape.op("loss", [x], size_bytes=4, time_s=0.0))


def residual(*, n_blocks: int, width_bytes: int = 1 << 20) -> Graph:
    """Blocks norm, conv, relu, conv beside a skip, as in a residual net of equal widths."""
    tape = Tape()
    x = tape.op("stem", [tape.input("x", width_bytes)], size_bytes=width_bytes, time_s=1e-4)
    for i in range(n_blocks):
        h = tape.op(f"{i}.norm", [x], size_bytes=(width_bytes, 4096), time_s=1e-5)
        h = tape.op(f"{i}.conv1", [h], size_bytes=width_bytes, time_s=9e-5, parameter_bytes=65536)
        h = tape.op(
            f"{i}.relu",
            [h],
            size_bytes=width_bytes,
            time_s=5e-6,
            saves_inputs=False,
            saves_output=True,
        )
        h = tape.op(f"{i}.conv2", [h], size_bytes=width_bytes, time_s=9e-5, parameter_bytes=65536)
        x = tape.op(f"{i}.add", [x, h], size_bytes=width_bytes, time_s=8e-6, saves_inputs=False)
    return tape.graph(tape.op("loss", [x], size_bytes=4, time_s=1e-6))


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
    tape = Tape()
    row = n_tokens * element_bytes
    inner = 7 * hidden // 2

    def mix(name: str, x: str, m: int, n: int) -> str:
        return tape.op(
            name,
            [x],
            size_bytes=row * n,
            time_s=2 * n_tokens * m * n / flops_per_s,
            parameter_bytes=m * n * element_bytes,
        )

    def each(name: str, inputs: list[str], n: int, *, saves: bool = True) -> str:
        time_s = (1 + len(inputs)) * row * n / bytes_per_s
        return tape.op(name, inputs, size_bytes=row * n, time_s=time_s, saves_inputs=saves)

    def norm(name: str, x: str) -> str:
        time_s = 2 * row * hidden / bytes_per_s
        wide = each(f"{name}.to", [x], 2 * hidden, saves=False)
        square = each(f"{name}.square", [wide], 2 * hidden)
        scale = tape.op(f"{name}.rsqrt", [square], size_bytes=4 * n_tokens, time_s=time_s)
        wide = tape.op(f"{name}.mul", [wide, scale], size_bytes=2 * row * hidden, time_s=2 * time_s)
        return tape.op(
            f"{name}.scale",
            [wide],
            size_bytes=row * hidden,
            time_s=time_s,
            parameter_bytes=hidden * element_bytes,
        )

    x = tape.op(
        "embed",
        [tape.input("tokens", 8 * n_tokens)],
        size_bytes=row * hidden,
        time_s=2 * row * hidden / bytes_per_s,
        parameter_bytes=n_words * hidden * element_bytes,
    )
    for i in range(n_layers):
        h = norm(f"{i}.norm1", x)
        q, k, v = (mix(f"{i}.{s}", h, hidden, width) for s, width in _heads(hidden))
        q = each(f"{i}.rotate_q", [q], hidden, saves=False)
        k = each(f"{i}.rotate_k", [k], hidden // 4, saves=False)
        a = tape.op(
            f"{i}.attention",
            [q, k, v],
            size_bytes=(row * hidden, 4 * n_tokens * 32),
            time_s=2 * n_tokens * n_tokens * hidden / flops_per_s,
            saves_output=True,
        )
        x = each(f"{i}.add1", [x, mix(f"{i}.o", a, hidden, hidden)], hidden, saves=False)
        h = norm(f"{i}.norm2", x)
        gate = mix(f"{i}.gate", h, hidden, inner)
        up = mix(f"{i}.up", h, hidden, inner)
        product = each(f"{i}.mul", [each(f"{i}.silu", [gate], inner), up], inner)
        x = each(f"{i}.add2", [x, mix(f"{i}.down", product, inner, hidden)], hidden, saves=False)
    logits = mix("head", norm("norm", x), hidden, n_words)
    wide = each("logits", [logits], 2 * n_words, saves=False)
    soft = tape.op(
        "log_softmax",
        [wide],
        size_bytes=2 * row * n_words,
        time_s=4 * row * n_words / bytes_per_s,
        saves_inputs=False,
        saves_output=True,
    )
    return tape.graph(tape.op("loss", [soft], size_bytes=4, time_s=1e-6, saves_inputs=False))


def _heads(hidden: int) -> tuple[tuple[str, int], ...]:
    return ("q", hidden), ("k", hidden // 4), ("v", hidden // 4)


def u_shape(*, depth: int = 5, n_convs: int = 2, width_bytes: int = 64 << 20) -> Graph:
    """A U-Net: each level halves the side and doubles the channels; skips go across."""
    tape = Tape()
    x = tape.input("x", width_bytes // 16)
    conv_s, touch_s = 1e-3, width_bytes * 2e-12
    skips: list[str] = []

    def level(name: str, x: str, d: int) -> str:
        size = width_bytes >> d
        for i in range(n_convs):
            x = tape.op(
                f"{name}.conv{i}",
                [x],
                size_bytes=size,
                time_s=conv_s,
                parameter_bytes=4 * 9 * (64 << d) ** 2,
                workspace_bytes=size // 2,
            )
            x = tape.op(f"{name}.norm{i}", [x], size_bytes=(size, 512 << d), time_s=touch_s / 2**d)
            x = tape.op(
                f"{name}.relu{i}",
                [x],
                size_bytes=size,
                time_s=touch_s / 2**d,
                saves_inputs=False,
                saves_output=True,
            )
        return x

    for d in range(depth):
        x = level(f"down{d}", x, d)
        if d < depth - 1:
            skips.append(x)
            x = tape.op(f"pool{d}", [x], size_bytes=width_bytes >> (d + 2), time_s=touch_s / 2**d)
    for d in reversed(range(depth - 1)):
        x = tape.op(
            f"up{d}",
            [x],
            size_bytes=width_bytes >> d,
            time_s=conv_s / 4,
            parameter_bytes=4 * 4 * (64 << d) ** 2 * 2,
        )
        x = tape.op(
            f"cat{d}",
            [skips[d], x],
            size_bytes=2 * (width_bytes >> d),
            time_s=2 * touch_s / 2**d,
            saves_inputs=False,
        )
        x = level(f"out{d}", x, d)
    return tape.graph(tape.op("loss", [x], size_bytes=4, time_s=touch_s))


def pyramid(*, n_blocks: Sequence[int] = (3, 4, 6, 3), width_bytes: int = 100 << 20) -> Graph:
    """Bottleneck blocks in stages that halve, as in ResNet-50 (the default) and -101."""
    tape = Tape()
    x = tape.op("stem", [tape.input("x", width_bytes // 8)], size_bytes=width_bytes, time_s=2e-3)
    for s, n in enumerate(n_blocks):
        wide, narrow = (width_bytes >> s) * 2, (width_bytes >> s) // 2
        for b in range(n):
            skip, name = x, f"{s}.{b}"
            for i, size in enumerate((narrow, narrow, wide)):
                x = tape.op(
                    f"{name}.conv{i}",
                    [x],
                    size_bytes=size,
                    time_s=1e-3,
                    parameter_bytes=(1 << 18) << (2 * s),
                )
                x = tape.op(
                    f"{name}.norm{i}",
                    [x],
                    size_bytes=(size, 4096),
                    time_s=size * 4e-12,
                )
                if i < 2:
                    x = _relu(tape, f"{name}.relu{i}", x, size)
            if b == 0:
                skip = tape.op(
                    f"{name}.skip",
                    [skip],
                    size_bytes=wide,
                    time_s=1e-3,
                    parameter_bytes=(1 << 18) << (2 * s),
                )
            x = tape.op(
                f"{name}.add", [skip, x], size_bytes=wide, time_s=wide * 3e-12, saves_inputs=False
            )
            x = _relu(tape, f"{name}.relu2", x, wide)
    return tape.graph(tape.op("loss", [x], size_bytes=4, time_s=1e-5))


def _relu(tape: Tape, name: str, x: str, size_bytes: int) -> str:
    return tape.op(
        name,
        [x],
        size_bytes=size_bytes,
        time_s=size_bytes * 2e-12,
        saves_inputs=False,
        saves_output=True,
    )


def dense(*, n_layers: int = 24, growth_bytes: int = 4 << 20) -> Graph:
    """A dense block: each layer reads the outputs of all before it."""
    tape = Tape()
    found = [tape.op("stem", [tape.input("x", growth_bytes)], size_bytes=growth_bytes, time_s=1e-3)]
    for i in range(n_layers):
        size = growth_bytes * len(found)
        touch_s = 2 * size / 1e12
        h = tape.op(f"{i}.cat", found, size_bytes=size, time_s=touch_s, saves_inputs=False)
        h = tape.op(f"{i}.norm", [h], size_bytes=(size, 4096), time_s=touch_s)
        h = _relu(tape, f"{i}.relu", h, size)
        found.append(
            tape.op(
                f"{i}.conv",
                [h],
                size_bytes=growth_bytes,
                time_s=1e-4 * len(found),
                parameter_bytes=1 << 16,
            )
        )
    return tape.graph(tape.op("loss", found, size_bytes=4, time_s=1e-6))


def recurrent(*, n_steps: int, state_bytes: int = 1 << 16, n_cell_ops: int = 6) -> Graph:
    """A loop of cells: a few ops per step on a hidden state that is carried along."""
    tape = Tape()
    x = tape.input("x", state_bytes * n_steps)
    state = tape.op("start", [x], size_bytes=state_bytes, time_s=1e-6)
    for i in range(n_steps):
        h = tape.op(f"{i}.gates", [x, state], size_bytes=4 * state_bytes, time_s=2e-5)
        for j in range(n_cell_ops - 2):
            size = 4 * state_bytes if j == 0 else state_bytes
            h = tape.op(f"{i}.act{j}", [h], size_bytes=size, time_s=2e-6, saves_output=True)
        state = tape.op(f"{i}.state", [h, state], size_bytes=state_bytes, time_s=2e-6)
    return tape.graph(tape.op("loss", [state], size_bytes=4, time_s=1e-6))


def random_dag(*, seed: int, n_forward: int, n_later: int) -> Graph:
    """A small odd graph: skips, several outputs, views, zero sizes and times, effects, ops that may
    not run again, workspace, outputs made by the forward pass. Times and sizes are whole numbers.
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
    """A view of an input: no bytes of its own, no cost; now and then it may not be taken again."""
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
