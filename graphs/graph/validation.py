"""Validation of a graph: names, sizes, aliases, wiring and order of the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from graphs.graph.lookups import Lookups
from graphs.graph.parts import KINDS, PHASES, GraphError, Node, Tensor

MAX_BYTES = 2**60
"""One exbibyte; a larger tensor is an error in the file."""
MAX_TIME_S = 1e12
"""The longest time of one node: 30,000 years."""
MAX_TOTAL_BYTES = 2**61
"""The most bytes of all storages and one workspace; twice that many still fit into 63 bits."""


def validate(graph: Lookups) -> None:
    """Raise GraphError unless names, sizes, aliases, wiring and order are legal."""
    _check_names(graph.tensors, what="tensor")
    _check_names(graph.nodes, what="node")
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
        _check_tensor(tensor, tensors)
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


def _check_names(items: Sequence[Tensor | Node], *, what: str) -> None:
    """Raise GraphError unless all names are non-empty and unique.

    what: "tensor" or "node", for the message.
    """
    for name, count in Counter(item.name for item in items).items():
        if not name:
            raise GraphError(f"a {what} has an empty name")
        if count > 1:
            raise GraphError(f"two {what}s are called {name!r}; names must be unique")


def _check_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> None:
    """Raise GraphError unless size, kind and alias of the tensor are legal.

    tensors: name -> tensor, for all tensors of the graph.
    """
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
            f"tensor {tensor.name!r}: alias_of is {tensor.alias_of!r}, which is not a tensor"
        )
    if root.alias_of is not None:
        raise GraphError(
            f"tensor {tensor.name!r}: alias_of is {root.name!r}, itself an alias of "
            f"{root.alias_of!r}; name the root of the storage"
        )


def _check_node(node: Node) -> None:
    """Raise GraphError unless phase, time and workspace of the node are legal."""
    if node.phase not in PHASES:
        raise GraphError(f"node {node.name!r}: phase is {node.phase!r}; one of {', '.join(PHASES)}")
    if not 0 <= node.time_s <= MAX_TIME_S:
        raise GraphError(f"node {node.name!r}: time_s is {node.time_s}; it must be from 0 to 1e12")
    if not 0 <= node.workspace_bytes <= MAX_BYTES:
        raise GraphError(
            f"node {node.name!r}: workspace_bytes is {node.workspace_bytes}; "
            "it must be from 0 to 2**60"
        )


def _check_wiring(graph: Lookups) -> set[str]:
    """Check that inputs are made before they are read, tensors are made once and not read after
    they are overwritten, and phases come in order.

    Returns the tensors that nodes make. Raises GraphError.
    """
    tensors, made_by = graph.tensor_by_name, graph.producer
    made: set[str] = set()
    overwriter: dict[str, str] = {}  # overwritten tensor -> the node that did it
    phase_index = 0
    for node in graph.nodes:
        _check_node(node)
        if PHASES.index(node.phase) < phase_index:
            raise GraphError(
                f"node {node.name!r} of phase {node.phase} comes after a node of phase "
                f"{PHASES[phase_index]}; the order is {', '.join(PHASES)}"
            )
        phase_index = PHASES.index(node.phase)
        for name in node.inputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} reads {name!r}, which is not a tensor")
            if name in made_by and name not in made:
                raise GraphError(
                    f"node {node.name!r} reads {name!r}, which {made_by[name].name!r} makes later: "
                    "nodes must come in an order in which they can run, without cycles"
                )
            if name in overwriter:
                raise GraphError(
                    f"node {node.name!r} reads {name!r}, which {overwriter[name]!r} has overwritten"
                )
        input_storages = {graph.root(name) for name in node.inputs}
        for name in node.outputs:
            if name not in tensors:
                raise GraphError(f"node {node.name!r} makes {name!r}, which is not a tensor")
            if name in made:
                raise GraphError(f"tensor {name!r} is made twice (again by {node.name!r})")
            root = tensors[name].alias_of
            if root in made_by and root not in made and root not in node.outputs:
                raise GraphError(f"tensor {name!r} is made before {root!r}, whose alias it is")
            if root in overwriter and root not in input_storages:
                raise GraphError(
                    f"node {node.name!r} makes {name!r}, an alias of {root!r}, which "
                    f"{overwriter[root]!r} has overwritten; let it read what is there now"
                )
            made.add(name)
        if node.overwrites is not None:
            _check_overwrite(node, graph)
            root = graph.root(node.overwrites)
            overwritten = made.intersection((root, *graph.views[root])).difference(node.outputs)
            overwriter |= dict.fromkeys(overwritten, node.name)
    for name in graph.outputs:
        if name in overwriter:
            raise GraphError(f"outputs names {name!r}, which {overwriter[name]!r} has overwritten")
    return made


def _check_overwrite(node: Node, graph: Lookups) -> None:
    """Check that the overwritten storage is one that the step makes, and that all nodes which make
    or read it run only once, since a recomputation could not read what was overwritten."""
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
