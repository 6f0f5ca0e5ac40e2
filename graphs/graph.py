"""The problem: one training step as a graph of operators (time) and tensors (bytes).

A `Graph` lists the operators of the step in the order in which the framework would run them, and
the tensors that they read and write. It knows nothing of torch; `graphs.trace` makes it from a
model, `Graph.load` from a file, `graphs.synthetic.nets` from numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from graphs.files import FormatError, Record, read_json, write_json
from graphs.meta import GraphMeta

Kind = Literal[
    "parameter", "buffer", "optimizer_state", "input", "tangent", "activation", "gradient", "output"
]
Phase = Literal["forward", "outside", "backward", "optimizer"]

KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)
FORMAT = "graph/1"
MAX_BYTES = 2**60
"""No tensor is larger than an exbibyte: a size above it is a mistake or an attack."""


class GraphError(ValueError):
    """What was given is not a graph; the message names the field and what would be right."""


@dataclass(frozen=True)
class Tensor:
    """What a node reads or writes.

    name: unique in its graph.
    size_bytes: bytes of its storage. An alias holds its root's storage and adds nothing.
    kind: what it is for the reader of a report; the judge does not look at it.
    alias_of: the tensor whose storage it shares; that one is no alias itself.
    """

    name: str
    size_bytes: int
    kind: Kind = "activation"
    alias_of: str | None = None


@dataclass(frozen=True)
class Node:
    """One operator call.

    inputs, outputs: names of tensors. A node without outputs has an effect only (an update of a
        buffer, the optimizer's step).
    time_s: seconds of one run.
    workspace_bytes: bytes that the operator takes beside its inputs and outputs while it runs.
    recomputable: whether it may run again and give the same bits (read for forward nodes only;
        the others run once).
    module: the path of the module that called it, for reports: "blocks.3.attn".
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_s: float
    workspace_bytes: int = 0
    phase: Phase = "forward"
    recomputable: bool = True
    module: str = ""


@dataclass(frozen=True)
class Graph:
    """A training step: nodes in the framework's order, tensors, and what must be there at its end.

    Validated on construction; raises GraphError.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    meta: GraphMeta = field(default_factory=GraphMeta, compare=False)

    def __post_init__(self) -> None:
        if isinstance(
            self.meta, dict
        ):  # a graph written by hand: Graph(..., meta={"model": "mine"})
            object.__setattr__(self, "meta", GraphMeta.from_json(self.meta))
        _validate(self)

    def __repr__(self) -> str:
        """One line: all of it would fill pages."""
        return (
            f"Graph({len(self.nodes)} nodes, {len(self.tensors)} tensors, "
            f"{self.resident_bytes} bytes resident, {self.graph_id[:19]})"
        )

    @cached_property
    def tensor_by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that makes each tensor; resident tensors have none."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each tensor, in graph order."""
        readers: dict[str, list[Node]] = {tensor.name: [] for tensor in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def forward_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.phase == "forward")

    @cached_property
    def later_nodes(self) -> tuple[Node, ...]:
        """Every node that is not of the forward phase: each runs exactly once."""
        return tuple(node for node in self.nodes if node.phase != "forward")

    @cached_property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that no node makes: on the device for the whole step (aliases of them too)."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.producer)

    @cached_property
    def resident_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.resident if tensor.alias_of is None)

    @cached_property
    def baseline_time_s(self) -> float:
        """Seconds of the step when each node runs once."""
        return math.fsum(node.time_s for node in self.nodes)

    def root(self, name: str) -> str:
        """The tensor that owns the storage of the named one."""
        return self.tensor_by_name[name].alias_of or name

    @cached_property
    def views(self) -> dict[str, tuple[str, ...]]:
        """The aliases that nodes make of each storage; only storages with such aliases."""
        views: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.alias_of is not None and tensor.name in self.producer:
                views.setdefault(tensor.alias_of, []).append(tensor.name)
        return {root: tuple(names) for root, names in views.items()}

    @cached_property
    def graph_id(self) -> str:
        """SHA-256 of the structure: what a schedule needs in order to mean the same thing.

        Names, ops, wiring, phases, sizes, aliases and outputs; no times, workspace or metadata. The
        optimizer is left out: `apply` runs the model, whatever optimizer steps afterwards.
        """
        made_late = {
            name for node in self.nodes if node.phase == "optimizer" for name in node.outputs
        }
        structure = {
            "nodes": [
                [node.name, node.op, list(node.inputs), list(node.outputs), node.phase]
                for node in self.nodes
                if node.phase != "optimizer"
            ],
            "tensors": [
                [tensor.name, tensor.size_bytes, tensor.alias_of]
                for tensor in self.tensors
                if tensor.kind != "optimizer_state" and tensor.name not in made_late
            ],
            "outputs": [name for name in self.outputs if name not in made_late],
        }
        canonical = json.dumps(structure, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def module_part(self) -> Graph:
        """What `apply` runs: no nodes of phases outside and optimizer, no resident tensor unread.

        What the caller computes and hands back to the backward pass becomes resident. Tracing the
        module alone and tracing it with its loss and optimizer give the same module part.
        """
        nodes = tuple(node for node in self.nodes if node.phase in ("forward", "backward"))
        used = {name for node in nodes for name in (*node.inputs, *node.outputs)}
        used |= {t.alias_of for t in self.tensors if t.alias_of and t.name in used}
        made = {name for node in nodes for name in node.outputs}
        return Graph(
            nodes=nodes,
            tensors=tuple(tensor for tensor in self.tensors if tensor.name in used),
            outputs=tuple(name for name in self.outputs if name in made),
            meta=self.meta,
        )

    def save(self, path: str | Path) -> None:
        """Write `graph.json` (format graph/1); the file appears whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read `graph.json`; raises FormatError naming the field that is wrong."""
        return cls.from_json(read_json(path), source=str(path))

    def to_json(self) -> dict[str, Any]:
        """The plain dictionary of format graph/1."""
        return {
            "format": FORMAT,
            "meta": self.meta.to_json(),
            "outputs": list(self.outputs),
            "tensors": [
                {
                    "name": tensor.name,
                    "size_bytes": tensor.size_bytes,
                    "kind": tensor.kind,
                    "alias_of": tensor.alias_of,
                }
                for tensor in self.tensors
            ],
            "nodes": [
                {
                    "name": node.name,
                    "op": node.op,
                    "inputs": list(node.inputs),
                    "outputs": list(node.outputs),
                    "time_s": node.time_s,
                    "workspace_bytes": node.workspace_bytes,
                    "phase": node.phase,
                    "recomputable": node.recomputable,
                    "module": node.module,
                }
                for node in self.nodes
            ],
        }

    @classmethod
    def from_json(cls, value: object, *, source: str = "graph") -> Graph:
        """Build a graph from the dictionary of format graph/1; unknown extra fields are ignored."""
        record = Record(value, where=source)
        record.expect_format(FORMAT)
        tensors = tuple(_tensor(item) for item in record.records("tensors"))
        nodes = tuple(_node(item) for item in record.records("nodes"))
        try:
            return cls(
                nodes=nodes,
                tensors=tensors,
                outputs=record.strings("outputs"),
                meta=GraphMeta.from_json(record.mapping("meta", default={})),
            )
        except GraphError as error:
            raise FormatError(f"{source}: {error}") from error


def _tensor(record: Record) -> Tensor:
    return Tensor(
        name=record.string("name"),
        size_bytes=record.integer("size_bytes"),
        kind=record.choice("kind", KINDS),  # type: ignore[arg-type]
        alias_of=record.string("alias_of", default=None),
    )


def _node(record: Record) -> Node:
    return Node(
        name=record.string("name"),
        op=record.string("op"),
        inputs=record.strings("inputs"),
        outputs=record.strings("outputs"),
        time_s=record.number("time_s"),
        workspace_bytes=record.integer("workspace_bytes", default=0),
        phase=record.choice("phase", PHASES),  # type: ignore[arg-type]
        recomputable=record.boolean("recomputable", default=True),
        module=record.string("module", default=""),
    )


def is_under(path: str, ancestor: str) -> bool:
    """Whether the module at `path` is the one at `ancestor` ("": the model) or inside of it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


Named = TypeVar("Named", Tensor, Node)


def _validate(graph: Graph) -> None:
    """What a legal graph is, declared once: names, sizes, aliases, wiring and order."""
    tensors = _unique(graph.tensors, what="tensor")
    _unique(graph.nodes, what="node")
    for tensor in graph.tensors:
        _check_tensor(tensor, tensors)
    made = _check_wiring(graph, tensors)
    for tensor in graph.tensors:
        root = tensor.alias_of
        if root is not None and root in made and tensor.name not in made:
            raise GraphError(
                f"tensor {tensor.name!r} is an alias of {root!r}, which a node makes, but no node "
                "outputs the alias; let the node that makes it, or a view node, output it"
            )
    for name in graph.outputs:
        if name not in tensors:
            raise GraphError(f"outputs names {name!r}, which is no tensor of the graph")
    if len(set(graph.outputs)) != len(graph.outputs):
        raise GraphError("outputs names a tensor twice")


def _unique(items: Iterable[Named], *, what: str) -> dict[str, Named]:
    found: dict[str, Named] = {}
    for item in items:
        if not item.name:
            raise GraphError(f"a {what} has an empty name")
        if item.name in found:
            raise GraphError(f"two {what}s are called {item.name!r}; names must be unique")
        found[item.name] = item
    return found


def _check_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> None:
    if not 0 <= tensor.size_bytes <= MAX_BYTES:
        raise GraphError(
            f"tensor {tensor.name!r}: size_bytes is {tensor.size_bytes}; it must be from 0 to 2**60"
        )
    if tensor.kind not in KINDS:
        raise GraphError(
            f"tensor {tensor.name!r}: kind is {tensor.kind!r}; one of {', '.join(KINDS)}"
        )
    if tensor.alias_of is None:
        return
    root = tensors.get(tensor.alias_of)
    if root is None:
        raise GraphError(
            f"tensor {tensor.name!r}: alias_of is {tensor.alias_of!r}, which is no tensor"
        )
    if root.alias_of is not None:
        raise GraphError(
            f"tensor {tensor.name!r}: alias_of is {root.name!r}, itself an alias of "
            f"{root.alias_of!r}; name the root of the storage"
        )


def _check_wiring(graph: Graph, tensors: dict[str, Tensor]) -> set[str]:
    """Inputs exist before they are read, outputs are made once, phases come in order."""
    made_by = {name: node.name for node in graph.nodes for name in node.outputs}
    made: set[str] = set()
    rank = 0
    for node in graph.nodes:
        _check_node(node)
        if PHASES.index(node.phase) < rank:
            raise GraphError(
                f"node {node.name!r} of phase {node.phase} comes after a node of phase "
                f"{PHASES[rank]}; the order is {', '.join(PHASES)}"
            )
        rank = PHASES.index(node.phase)
        for name in node.inputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} reads {name!r}, which is no tensor")
            if name in made_by and name not in made:
                raise GraphError(
                    f"node {node.name!r} reads {name!r}, which {made_by[name]!r} makes later: "
                    "nodes must come in an order in which they can run, without cycles"
                )
        for name in node.outputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} makes {name!r}, which is no tensor")
            if name in made:
                raise GraphError(f"tensor {name!r} is made twice (again by {node.name!r})")
            root = tensors[name].alias_of
            if root in made_by and root not in made and root not in node.outputs:
                raise GraphError(f"tensor {name!r} is made before {root!r}, whose alias it is")
            made.add(name)
    return made


def _check_node(node: Node) -> None:
    if node.phase not in PHASES:
        raise GraphError(f"node {node.name!r}: phase is {node.phase!r}; one of {', '.join(PHASES)}")
    if not (math.isfinite(node.time_s) and node.time_s >= 0):
        raise GraphError(f"node {node.name!r}: time_s is {node.time_s}; it must be finite, not < 0")
    if not 0 <= node.workspace_bytes <= MAX_BYTES:
        raise GraphError(
            f"node {node.name!r}: workspace_bytes is {node.workspace_bytes}; "
            "it must be from 0 to 2**60"
        )
