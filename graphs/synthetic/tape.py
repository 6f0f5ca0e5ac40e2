"""Builds synthetic graphs: a forward pass of ops with given bytes and seconds, and the backward
pass that autograd would add to it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphs.graph import Graph, Kind, Node, Tensor


@dataclass
class Tape:
    """Records forward ops and what they save for backward, then adds the backward ops.

    The backward of an op takes `backward_ratio` times its forward time, reads the gradient of its
    output and what it saved, and makes one gradient per input and per parameter (the latter are
    outputs of the graph). Several gradients of one tensor are summed pairwise, in ops that take
    `add_s_per_byte` for each byte that they read or write.
    """

    backward_ratio: float = 2.0
    add_s_per_byte: float = 1e-12
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _saved: list[tuple[str, ...]] = field(default_factory=list)
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
        size_bytes: int | Sequence[int],
        time_s: float,
        *,
        parameter_bytes: int | None = None,
        saves_inputs: bool = True,
        saves_output: bool = False,
        workspace_bytes: int = 0,
        recomputable: bool = True,
    ) -> str:
        """Run an op forward; returns its first output.

        size_bytes: bytes of its output, or of each of several outputs; all but the first of these
            are saved for backward.
        time_s: seconds of the forward op.
        parameter_bytes: bytes of the op's parameter, whose gradient its backward makes (None: it
            has no parameter).
        saves_inputs, saves_output: what is saved for backward. A parameter always is.
        workspace_bytes: of the forward op, and of its backward op.
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
            )
        )
        saved = [*(read if saves_inputs else read[len(inputs) :]), *outputs[1:]]
        if saves_output:
            saved.append(outputs[0])
        self._saved.append(tuple(saved))
        return outputs[0]

    def relu(self, name: str, x: str, size_bytes: int, time_s: float) -> str:
        """An op whose backward reads its result instead of its input."""
        return self.op(name, [x], size_bytes, time_s, saves_inputs=False, saves_output=True)

    def graph(self, loss: str) -> Graph:
        """Add the backward pass from this tensor; the gradients of parameters are the outputs."""
        seed = self.tensor(f"grad.{loss}", self._bytes[loss], "tangent")
        gradient = {loss: seed}
        outputs = [loss]
        for op, saved in reversed([*zip(self.nodes, self._saved, strict=True)]):
            output = op.outputs[0]
            if output not in gradient:
                continue
            gradients: list[str] = []
            to_sum: list[tuple[str, str]] = []  # tensors that already have a gradient: sum both
            for name in dict.fromkeys(op.inputs):
                if name in self._leaves:
                    continue
                part = f"grad.{name}" if name not in gradient else f"grad.{name}@{op.name}"
                self.tensor(part, self._bytes[name], "gradient")
                gradients.append(part)
                if name in gradient:
                    to_sum.append((name, part))
                else:
                    gradient[name] = part
                if name.endswith(".weight"):
                    outputs.append(part)
            read = (gradient[output], *saved)
            time_s = self.backward_ratio * op.time_s
            self._add_backward(f"{op.name}.backward", read, gradients, time_s, op.workspace_bytes)
            for name, part in to_sum:
                total = self.tensor(f"{part}+", self._bytes[name], "gradient")
                time_s = 3 * self._bytes[name] * self.add_s_per_byte
                self._add_backward(f"{part}.add", (gradient[name], part), [total], time_s, 0)
                gradient[name] = total
        return Graph(nodes=tuple(self.nodes), tensors=tuple(self.tensors), outputs=tuple(outputs))

    def _add_backward(
        self, name: str, read: Sequence[str], made: Sequence[str], time_s: float, workspace: int
    ) -> None:
        op, inputs = name.rsplit(".", 1)[-1], tuple(dict.fromkeys(read))
        self.nodes.append(
            Node(name, op, inputs, tuple(made), time_s, workspace, "backward", recomputable=False)
        )
