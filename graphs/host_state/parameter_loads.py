"""Parameters in host memory, which nodes of the step copy to the device.

Such a parameter is on the device only while operators read it. A node without inputs makes it: a
copy from the host, whose time is that of the link. The node is recomputable, so the solver decides,
as for any other storage, whether the parameter stays on the device between forward and backward
pass or is copied again, and its proofs hold. These nodes never copy back to the host, since only
the optimizer changes parameters (`graphs.host_state`).

The idea is that of ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857), here for one device.
The copies are counted on the compute stream, one after the other with the operators; a runtime that
overlaps them with operators is faster than planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator

from graphs.graph import Graph, Node

LEAST_BYTES = 2**18
"""Smaller parameters stay on the device; copying them takes longer than the link's rate says."""
LOAD = "copy of a parameter from the host"
"""The op of the nodes that copy a parameter to the device."""


def load_name(tensor: str) -> str:
    """The name of the node that copies a parameter to the device. No traced name starts like this:
    none has a dot there."""
    return f"load.{tensor}"


def loadable_parameters(graph: Graph) -> tuple[str, ...]:
    """The parameters that can be on the host, in the order in which the step first reads them.

    Parameters are left out that are smaller than LEAST_BYTES, are not contiguous, share a storage
    or are part of a larger one, cannot be copied, are read by a loss outside of the model, are
    returned by the model, or are read by no node except the optimizer's.
    """
    layout = graph.meta.parameter_layout.values()
    parts = {each.get("tensor") for each in layout if each.get("fills_storage") is False}
    parameters = {name for name in graph.meta.parameters.values() if name not in parts}
    shared = {name for tensor in graph.tensors for name in (tensor.alias_of,) if name is not None}
    outside = {name for node in graph.nodes if node.phase == "outside" for name in node.inputs}
    excluded = {*shared, *outside, *graph.outputs, *graph.producer}
    found = [
        tensor.name
        for tensor in graph.resident
        if tensor.name in parameters
        and tensor.kind == "parameter"
        and tensor.alias_of is None
        and tensor.copyable
        and tensor.name not in excluded
        and tensor.size_bytes >= LEAST_BYTES
    ]
    first_read = {name: index for index, name in _first_reads(graph, found)}
    return tuple(sorted(first_read, key=lambda name: first_read[name]))


def with_loads(graph: Graph, tensors: Iterable[str], *, in_s: Callable[[int], float]) -> Graph:
    """The step with these parameters on the host: nodes copy each to the device before the first
    node that reads it, at the latest at the end of the forward pass.

    tensors: from `loadable_parameters`.
    in_s: bytes -> seconds of a copy to the device.
    """
    modules = {tensor: name.rpartition(".")[0] for name, tensor in graph.meta.parameters.items()}
    n_forward = len(graph.forward_nodes)
    loads_before: dict[int, list[Node]] = {}
    for index, name in sorted(_first_reads(graph, tensors)):
        load = Node(
            name=load_name(name),
            op=LOAD,
            inputs=(),
            outputs=(name,),
            time_s=in_s(graph.tensor_by_name[name].size_bytes),
            module=modules.get(name, ""),
        )
        loads_before.setdefault(min(index, n_forward), []).append(load)
    nodes: list[Node] = []
    for index, node in enumerate(graph.nodes):
        nodes += loads_before.get(index, ())
        if node.phase == "optimizer":  # it makes its own copies (`graphs.host_state`)
            reads = tuple(name for name in node.inputs if name not in tensors)
            node = dataclasses.replace(node, inputs=reads)
        nodes.append(node)
    nodes += loads_before.get(len(graph.nodes), ())
    return dataclasses.replace(graph, nodes=tuple(nodes))


def without_loads(graph: Graph, tensors: Collection[str]) -> Graph:
    """The step that `with_loads` was given: undoes it.

    tensors: the parameters that are on the host.
    """
    loads = {load_name(name) for name in tensors}
    parameters = [tensor.name for tensor in graph.tensors if tensor.kind == "parameter"]
    nodes = []
    for node in graph.nodes:
        if node.name in loads:
            continue
        if node.phase == "optimizer":
            *others, state = (name for name in node.inputs if name not in parameters)
            read = (name for name in parameters if name in tensors or name in node.inputs)
            node = dataclasses.replace(node, inputs=(*others, *read, state))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _first_reads(graph: Graph, tensors: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(index of the first forward or backward node that reads the parameter, its name); parameters
    that no such node reads are left out."""
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    for name in tensors:
        readers = [node for node in graph.consumers[name] if node.phase in ("forward", "backward")]
        if readers:
            yield index_of[readers[0].name], name
