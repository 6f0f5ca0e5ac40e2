"""One training step as a graph of operators (with seconds) and tensors (with bytes).

A `Graph` lists the operators of the step in the order in which the framework runs them, and the
tensors that they read and write. It needs no torch: `graphs.trace` builds it from a model,
`Graph.load` from a file, `graphs.synthetic.nets` from numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graphs.files import FormatError, read_json, write_json
from graphs.graph.file_format import read_fields, to_json
from graphs.graph.lookups import Lookups
from graphs.graph.meta import GraphMeta
from graphs.graph.parts import DROP, RANDOM_STATE, GraphError, Kind, Node, Phase, Tensor
from graphs.graph.validation import validate

__all__ = ["RANDOM_STATE", "Graph", "GraphError", "Kind", "Node", "Phase", "Tensor", "is_under"]


@dataclass(frozen=True)
class Graph(Lookups):
    """A training step: nodes in the framework's order, tensors, and the outputs, which are live at
    the end.

    The fields are described at `Lookups`, which declares them. Validated on construction; raises
    GraphError.
    """

    def __post_init__(self) -> None:
        if isinstance(self.meta, dict):  # a graph written by hand
            object.__setattr__(self, "meta", GraphMeta.from_json(self.meta))
        validate(self)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.nodes)} nodes, {len(self.tensors)} tensors, "
            f"{self.resident_bytes} bytes resident, {self.graph_id[:19]})"
        )

    @cached_property
    def graph_id(self) -> str:
        """SHA-256 of the structure that a schedule refers to.

        Includes names, ops, wiring, phases, overwrites, sizes, aliases and outputs, but no times,
        workspace or metadata. The optimizer is left out: `apply` runs the model, and any optimizer
        may step afterwards.
        """
        by_optimizer = {n for node in self.nodes if node.phase == "optimizer" for n in node.outputs}
        structure = {
            "nodes": [
                [node.name, node.op, list(node.inputs), list(node.outputs), node.phase]
                + ([node.overwrites] if node.overwrites else [])
                for node in self.nodes
                if node.phase != "optimizer"
            ],
            "tensors": [
                [tensor.name, tensor.size_bytes, tensor.alias_of]
                for tensor in self.tensors
                if tensor.kind != "optimizer_state" and tensor.name not in by_optimizer
            ],
            "outputs": [name for name in self.outputs if name not in by_optimizer],
        }
        canonical = json.dumps(structure, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def module_part(self) -> Graph:
        """The part that `apply` runs: forward and backward nodes, and the tensors that they use.

        Gradients that the caller's loss hands to the backward pass become resident. The module part
        is the same whether the module was traced alone or with loss and optimizer, and is the step
        of one micro-batch.
        """
        returned = self.returned if DROP in self.node_by_name else ()
        return self._part(("forward", "backward"), returned=returned)

    def loss_part(self) -> Graph:
        """The part that the caller computes: the loss outside of the model.

        In it the model's outputs are resident, and come first among the outputs.
        """
        return self._part(("outside",), returned=self.returned)

    @property
    def returned(self) -> tuple[str, ...]:
        """The outputs of the model, in the order in which it returns them, including those that the
        caller drops before the backward pass."""
        if (drop := self.node_by_name.get(DROP)) is not None:
            return drop.inputs
        made = {name for node in self.forward_nodes for name in node.outputs}
        return tuple(name for name in self.outputs if name in made)

    def _part(self, phases: tuple[Phase, ...], *, returned: tuple[str, ...] = ()) -> Graph:
        """The graph of the nodes of these phases; `returned` come first among its outputs."""
        nodes = tuple(node for node in self.nodes if node.phase in phases)
        used = {name for node in nodes for name in (*node.inputs, *node.outputs)} | {*returned}
        used |= {t.alias_of for t in self.tensors if t.alias_of and t.name in used}
        made = {name for node in nodes for name in node.outputs}
        return Graph(
            nodes=nodes,
            tensors=tuple(tensor for tensor in self.tensors if tensor.name in used),
            outputs=tuple(dict.fromkeys((*returned, *(n for n in self.outputs if n in made)))),
            meta=self.meta,
        )

    def save(self, path: str | Path) -> None:
        """Write the graph to a file of format graph/2, atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a graph file; raises FormatError, which names the wrong field."""
        return cls.from_json(read_json(path), source=str(path))

    def to_json(self) -> dict[str, Any]:
        """The graph as a plain dictionary of format graph/2."""
        return to_json(self)

    @classmethod
    def from_json(cls, value: object, *, source: str = "graph") -> Graph:
        """Build a graph from a dictionary of format graph/2; unknown fields are ignored.

        source: where the dictionary comes from, for error messages.

        Raises FormatError, which says what is wrong and where.
        """
        fields = read_fields(value, source=source)
        try:
            return cls(**fields)
        except GraphError as error:
            raise FormatError(f"{source}: {error}") from error


def is_under(path: str, ancestor: str) -> bool:
    """Whether the module at `path` is the module at `ancestor` ("": the model) or inside it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")
