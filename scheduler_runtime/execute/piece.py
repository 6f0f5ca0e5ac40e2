"""Generate a function for a section of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

Value = fx.Node
"""A value of the program: the node that defines it in the straight line."""


@dataclass(frozen=True)
class Piece:
    """A section of the program as one generated function.

    module: the generated code.
    inputs: the values that it reads, in the order of its arguments.
    last_reads: the inputs that are not read later.
    results: the values that it defines and returns: they are read later, or leave the program.
    gradients: pairs of a leaf's placeholder in the traced graph and the value of its gradient,
        which is complete after this piece.
    handed_out: values that leave the program after this piece and are not read later.
    """

    module: fx.GraphModule
    inputs: tuple[Value, ...]
    last_reads: frozenset[Value]
    results: tuple[Value, ...]
    gradients: tuple[tuple[fx.Node, Value], ...]
    handed_out: tuple[Value, ...]

    def run(self, state: dict[Value, Any]) -> None:
        """Run the piece: take its inputs from `state`, dropping those that are not read later, and
        add its results."""
        arguments = [state.pop(v) if v in self.last_reads else state[v] for v in self.inputs]
        results = self.module.forward(arguments)
        state.update(zip(self.results, results, strict=True))


def piece_of(
    body: list[fx.Node],
    read_later: set[Value],
    wanted: set[Value],
    resident: set[Value],
    gradients: tuple[tuple[fx.Node, Value], ...],
) -> Piece:
    """Make a function of the nodes in `body`.

    read_later: values that later pieces read.
    wanted: values that leave the program after this piece.
    resident: values that live from the start to the end of the step.
    gradients: as in `Piece`.
    """
    defined = set(body)
    inputs = dict.fromkeys(
        argument for node in body for argument in node.all_input_nodes if argument not in defined
    )
    results = tuple(v for v in body if v in read_later or v in wanted)
    graph = fx.Graph()
    graph.set_codegen(_BoxedCodeGen())
    names = {value: graph.placeholder(value.name) for value in inputs}
    for node in body:
        names[node] = copied = graph.node_copy(node, names.__getitem__)
        if type(node.target) is torch._ops.OpOverload:
            copied.target = _direct_call(node.target)
    graph.output([names[value] for value in results])
    module = fx.GraphModule(torch.nn.Module(), graph)
    kept = read_later | resident
    return Piece(
        module=module,
        inputs=tuple(inputs),
        last_reads=frozenset(v for v in inputs if v not in kept and v not in wanted),
        results=results,
        gradients=gradients,
        handed_out=tuple(v for v in wanted if v not in kept),
    )


@functools.cache
def _direct_call(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function that the generated code can call by a single name, for an operator.

    `torch.ops.aten.mm.default(...)` looks up five names and calls a Python function before it calls
    `_op`, as is done directly here: that is a third of the host's time for a small operator.
    """
    direct: Any = functools.partial(operator._op)
    namespace, _, name = str(operator).partition(".")
    direct.__module__, direct.__name__ = namespace, name.replace(".", "_")
    return direct  # type: ignore[no-any-return]
