"""The problem: one training step as a graph of operators (time) and tensors (bytes).

A `Graph` lists the operators of the step in the order in which the framework runs them, and the
tensors that they read and write. It needs no torch: `graphs.trace` builds it from a model,
`Graph.load` from a file, `graphs.synthetic.nets` from numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from graphs.files import FormatError, Record, read_json, write_json
from graphs.graph.meta import GraphMeta
from graphs.graph.parts import (
    DROP,
    KINDS,
    MAX_BYTES,
    PHASES,
    RANDOM_STATE,
    GraphError,
    Kind,
    Node,
    Phase,
    Tensor,
    check_names,
    check_node,
    check_tensor,
)

__all__ = ["RANDOM_STATE", "Graph", "GraphError", "Kind", "Node", "Phase", "Tensor", "is_under"]

FORMAT, OLDER_FORMATS = "graph/2", ("graph/1",)
MAX_TOTAL_BYTES = 2**61
"""Of all storages and one workspace: twice that many bytes still fit into 63 bits."""


@dataclass(frozen=True)
class Graph:
    """A training step: nodes in the framework's order, tensors, and what is live at its end.

    n_in_flight: micro-batches of a pipeline, or passes of a step with several (`graphs.passes`),
        whose forward pass has begun and whose backward pass has not ended, at most. This step is
        that of one of them; each of the others holds what its forward pass left for backward.
    accumulated: outputs that the backward pass makes if it is the first of those in flight to run;
        each later one, beside which one less is in flight, finds them on the device and adds to
        them: gradients of parameters.
    others_bytes: what each of the others holds at least, since it may be another call, or may have
        run backward (`in_turn`).
    in_turn: those in flight run backward one after the other, each by itself, and no other begins
        after that (GPipe). So gradients are added in place, and one that has run leaves
        others_bytes. Else one backward pass runs through all of them.
    host_state_bytes: of the optimizer's state, and of parameters (`graphs.parameter_loads`), which
        are in host memory for the whole step. Nodes of phase optimizer copy them through their
        workspace, and their time is that with the copies (`graphs.host_state`).

    Validated on construction; raises GraphError.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    meta: GraphMeta = field(default_factory=GraphMeta, compare=False)
    n_in_flight: int = 1
    host_state_bytes: int = 0
    accumulated: tuple[str, ...] = ()
    others_bytes: int = 0
    in_turn: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.meta, dict):  # a graph written by hand
            object.__setattr__(self, "meta", GraphMeta.from_json(self.meta))
        _validate(self)

    def __repr__(self) -> str:
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
        """The node that outputs each tensor; resident tensors have none."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each tensor, in graph order."""
        readers: dict[str, list[Node]] = {tensor.name: [] for tensor in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):  # each reader once
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def forward_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.phase == "forward")

    @cached_property
    def later_nodes(self) -> tuple[Node, ...]:
        """All nodes of the other phases; each runs exactly once."""
        return tuple(node for node in self.nodes if node.phase != "forward")

    @cached_property
    def n_before_optimizer(self) -> int:
        """The nodes before the optimizer's first one, in whose step no other micro-batch is in
        flight any more; without an optimizer all nodes."""
        late = (index for index, node in enumerate(self.nodes) if node.phase == "optimizer")
        return next(late, len(self.nodes))

    @cached_property
    def awaited_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that are on the device while it runs in a
        backward pass that finds them there, and not yet in the one that makes them. So is what one
        that has run leaves.

        A gradient is awaited until the last node that reads it has run.
        """
        left_bytes = self.others_bytes if self.in_turn else 0
        awaited = tuple(accumulate(reversed(self._completed_bytes)))[::-1]
        return tuple(left_bytes + each for each in awaited)

    @cached_property
    def summed_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that it is the last one to read, unless they
        are added in place. A backward pass that finds them on the device has their sum beside both
        then, since autograd adds what it has got for several uses of a tensor out of place."""
        return tuple(0 if self.in_turn else each for each in self._completed_bytes)

    @cached_property
    def _completed_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that it is the last one to make or read."""
        late = dict.fromkeys(self.accumulated, 0)
        for index, node in enumerate(self.later_nodes):
            if node.phase != "optimizer":
                late |= dict.fromkeys(late.keys() & {*node.inputs, *node.outputs}, index)
        leaves = [0] * len(self.later_nodes)
        for name, index in late.items():
            leaves[index] += self.tensor_by_name[name].size_bytes
        return tuple(leaves)

    @cached_property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that no node outputs: live for the whole step (their aliases too)."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.producer)

    @cached_property
    def resident_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.resident if tensor.alias_of is None)

    @cached_property
    def baseline_time_s(self) -> float:
        """Seconds of the step when each node runs once."""
        return math.fsum(node.time_s for node in self.nodes)

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """By node, what must be live for it to run: its inputs, and what it makes a view of.

        A view node normally reads a tensor on the storage; where the graph does not say so, the
        root of the storage is needed all the same.
        """
        return {node.name: self._needs(node) for node in self.nodes}

    def _needs(self, node: Node) -> tuple[str, ...]:
        if not self.views:
            return node.inputs
        known = {self.root(name) for name in node.inputs} | set(node.outputs)
        roots = dict.fromkeys(self.root(name) for name in node.outputs)
        return (*node.inputs, *(r for r in roots if r not in known and r in self.producer))

    def root(self, name: str) -> str:
        """The tensor that owns the storage of the named one."""
        return self.tensor_by_name[name].alias_of or name

    @cached_property
    def views(self) -> dict[str, tuple[str, ...]]:
        """Root -> its aliases that nodes output; only storages with such aliases."""
        views: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            if tensor.alias_of is not None and tensor.name in self.producer:
                views[tensor.alias_of] = (*views.get(tensor.alias_of, ()), tensor.name)
        return views

    @cached_property
    def graph_id(self) -> str:
        """SHA-256 of the structure that a schedule refers to.

        Names, ops, wiring, phases, overwrites, sizes, aliases and outputs; no times, workspace or
        metadata. The optimizer is left out: `apply` runs the model, whichever steps afterwards.
        """
        made_late = {n for node in self.nodes if node.phase == "optimizer" for n in node.outputs}
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
                if tensor.kind != "optimizer_state" and tensor.name not in made_late
            ],
            "outputs": [name for name in self.outputs if name not in made_late],
        }
        canonical = json.dumps(structure, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def module_part(self) -> Graph:
        """What `apply` runs: forward and backward nodes, and the tensors that they use.

        Gradients that the caller's loss hands to the backward pass become resident. Tracing the
        module alone and tracing it with its loss and optimizer give the same module part, that of
        one micro-batch.
        """
        returned = self.returned if DROP in self.node_by_name else ()
        return self._part(("forward", "backward"), returned=returned)

    def loss_part(self) -> Graph:
        """The loss that the caller computes.

        What the model returns is resident there, and comes first among the outputs.
        """
        return self._part(("outside",), returned=self.returned)

    @property
    def returned(self) -> tuple[str, ...]:
        """The outputs that forward nodes make, in the order in which the model returns them; those
        that the caller drops before the backward pass, too."""
        if (drop := self.node_by_name.get(DROP)) is not None:
            return drop.inputs
        made = {name for node in self.forward_nodes for name in node.outputs}
        return tuple(name for name in self.outputs if name in made)

    def _part(self, phases: tuple[Phase, ...], *, returned: tuple[str, ...] = ()) -> Graph:
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
        """Write `graph.json` (format graph/2), atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read `graph.json`; raises FormatError naming the field that is wrong."""
        return cls.from_json(read_json(path), source=str(path))

    def to_json(self) -> dict[str, Any]:
        """The plain dictionary of format graph/2."""
        optional: dict[str, tuple[Any, Any]] = {
            "n_in_flight": (self.n_in_flight, 1),
            "host_state_bytes": (self.host_state_bytes, 0),
            "accumulated": (list(self.accumulated), []),
            "others_bytes": (self.others_bytes, 0),
            "in_turn": (self.in_turn, False),
        }
        return {
            "format": FORMAT,
            "meta": self.meta.to_json(),
            **{name: value for name, (value, default) in optional.items() if value != default},
            "outputs": list(self.outputs),
            # the fields of Tensor and Node are those of the format, in its order
            "tensors": [dict(vars(tensor)) for tensor in self.tensors],
            "nodes": [
                {**vars(node), "inputs": list(node.inputs), "outputs": list(node.outputs)}
                for node in self.nodes
            ],
        }

    @classmethod
    def from_json(cls, value: object, *, source: str = "graph") -> Graph:
        """Build a graph from the dictionary of format graph/2; unknown fields are ignored.

        Format graph/1 is the same without `overwrites`.
        """
        record = Record(value, where=source)
        record.expect_format(FORMAT, *OLDER_FORMATS)
        tensors = tuple(
            Tensor(
                name=item.string("name"),
                size_bytes=item.integer("size_bytes"),
                kind=item.choice("kind", KINDS),  # type: ignore[arg-type]
                alias_of=item.string("alias_of", default=None),
            )
            for item in record.records("tensors")
        )
        if record.string("format") in OLDER_FORMATS:
            meta = Record(record.mapping("meta", default={}), where=f"{source}: meta")
            meta.expect_none_of("rewrites", newer=FORMAT)
            for item in record.records("nodes"):
                item.expect_none_of("overwrites", newer=FORMAT)
        nodes = tuple(
            Node(
                name=item.string("name"),
                op=item.string("op"),
                inputs=item.strings("inputs"),
                outputs=item.strings("outputs"),
                time_s=item.number("time_s"),
                workspace_bytes=item.integer("workspace_bytes", default=0),
                phase=item.choice("phase", PHASES),  # type: ignore[arg-type]
                recomputable=item.boolean("recomputable", default=True),
                module=item.string("module", default=""),
                overwrites=item.string("overwrites", default=None),
            )
            for item in record.records("nodes")
        )
        try:
            return cls(
                nodes=nodes,
                tensors=tensors,
                outputs=record.strings("outputs"),
                meta=GraphMeta.from_json(record.mapping("meta", default={})),
                n_in_flight=record.integer("n_in_flight", default=1),
                host_state_bytes=record.integer("host_state_bytes", default=0),
                accumulated=record.strings("accumulated", default=[]),
                others_bytes=record.integer("others_bytes", default=0),
                in_turn=record.boolean("in_turn", default=False),
            )
        except GraphError as error:
            raise FormatError(f"{source}: {error}") from error


def is_under(path: str, ancestor: str) -> bool:
    """Whether the module at `path` is the one at `ancestor` ("": the model) or inside of it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _validate(graph: Graph) -> None:
    """Raise GraphError unless names, sizes, aliases, wiring and order are legal."""
    check_names(graph.tensors, what="tensor")
    check_names(graph.nodes, what="node")
    if graph.n_in_flight < 1:
        raise GraphError(f"n_in_flight is {graph.n_in_flight}; it must be at least 1")
    for field_name in ("others_bytes", "host_state_bytes"):
        n_bytes = getattr(graph, field_name)
        if not 0 <= n_bytes <= MAX_BYTES:
            raise GraphError(f"{field_name} is {n_bytes}; it must be from 0 to 2**60")
    if graph.host_state_bytes and graph.n_before_optimizer == len(graph.nodes):
        raise GraphError(
            f"host_state_bytes is {graph.host_state_bytes}, and no node of phase optimizer uses it"
        )
    tensors = graph.tensor_by_name
    for tensor in graph.tensors:
        check_tensor(tensor, tensors)
    made = _check_wiring(graph)
    total_bytes = sum(tensor.size_bytes for tensor in graph.tensors if tensor.alias_of is None)
    total_bytes += max((node.workspace_bytes for node in graph.nodes), default=0)
    if total_bytes > MAX_TOTAL_BYTES:
        raise GraphError(
            f"tensors and the largest workspace take {total_bytes} bytes; at most 2**61 are allowed"
        )
    for tensor in graph.tensors:
        root = tensor.alias_of
        if root is not None and root in made and tensor.name not in made:
            raise GraphError(
                f"tensor {tensor.name!r} is an alias of {root!r}, which a node makes, but no node "
                "outputs the alias; let the node that makes it, or a view node, output it"
            )
    for name in graph.outputs:
        if name not in tensors:
            raise GraphError(f"outputs names {name!r}, which is not a tensor of the graph")
    if len(set(graph.outputs)) != len(graph.outputs):
        raise GraphError("outputs names a tensor twice")
    for name in graph.accumulated:
        maker = graph.producer.get(name)
        if name not in graph.outputs or maker is None or maker.phase != "backward":
            raise GraphError(
                f"accumulated names {name!r}, which is no output that a backward node makes"
            )


def _check_wiring(graph: Graph) -> set[str]:
    """Inputs exist before they are read, outputs are written once, phases come in order.

    Returns what the nodes make.
    """
    tensors, made_by = graph.tensor_by_name, graph.producer
    made: set[str] = set()
    lost: dict[str, str] = {}  # overwritten tensor -> the node that did it
    rank = 0
    for node in graph.nodes:
        check_node(node)
        if PHASES.index(node.phase) < rank:
            raise GraphError(
                f"node {node.name!r} of phase {node.phase} comes after a node of phase "
                f"{PHASES[rank]}; the order is {', '.join(PHASES)}"
            )
        rank = PHASES.index(node.phase)
        for name in node.inputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} reads {name!r}, which is not a tensor")
            if name in made_by and name not in made:
                raise GraphError(
                    f"node {node.name!r} reads {name!r}, which {made_by[name].name!r} makes later: "
                    "nodes must come in an order in which they can run, without cycles"
                )
            if name in lost:
                raise GraphError(
                    f"node {node.name!r} reads {name!r}, which {lost[name]!r} has overwritten"
                )
        on_inputs = {graph.root(name) for name in node.inputs}
        for name in node.outputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} makes {name!r}, which is not a tensor")
            if name in made:
                raise GraphError(f"tensor {name!r} is made twice (again by {node.name!r})")
            root = tensors[name].alias_of
            if root in made_by and root not in made and root not in node.outputs:
                raise GraphError(f"tensor {name!r} is made before {root!r}, whose alias it is")
            if root in lost and root not in on_inputs:
                raise GraphError(
                    f"node {node.name!r} makes {name!r}, an alias of {root!r}, which "
                    f"{lost[root]!r} has overwritten; let it read what is there now"
                )
            made.add(name)
        if node.overwrites is not None:
            _check_overwrite(node, graph)
            root = graph.root(node.overwrites)
            there = made.intersection((root, *graph.views[root])).difference(node.outputs)
            lost |= dict.fromkeys(there, node.name)
    for name in graph.outputs:
        if name in lost:
            raise GraphError(f"outputs names {name!r}, which {lost[name]!r} has overwritten")
    return made


def _check_overwrite(node: Node, graph: Graph) -> None:
    """Whatever touches the storage runs once, so that what was overwritten is never asked for."""
    old = node.overwrites or ""
    maker = graph.producer.get(old)

    def illegal(reason: str) -> GraphError:
        return GraphError(f"node {node.name!r} overwrites {old!r}, {reason}")

    if old not in node.inputs:
        raise illegal("which is not one of its inputs")
    if maker is None or graph.root(old) not in graph.producer:
        raise illegal("which is resident")
    on_storage = (graph.root(old), *graph.views.get(graph.root(old), ()))
    readers = (reader for name in on_storage for reader in graph.consumers[name])
    for other in (maker, node, *readers):
        if other.phase == "forward" and other.recomputable:
            raise illegal(f"but {other.name!r}, which makes or reads it, may run again")
    if [graph.root(name) for name in node.outputs] != [graph.root(old)]:
        raise illegal("so its one output must be an alias on that storage")
