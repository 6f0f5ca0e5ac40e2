"""The step as eager mode runs it without a plan: which tensors it holds longer or overwrites.

A graph is functional and made of single operators, and a schedule frees each tensor after its last
use. PyTorch's own step differs in five ways, which `graphs.trace` records in the graph's meta:

functions   The backward pass runs whole functions, each of one or more operators. What a function
            reads, and its intermediate results (`grad * (2 * self.pow(1))` for a square), stay
            live until it returns: C++ temporaries live as long as their expression, and the engine
            holds the incoming gradients and the saved tensors meanwhile. Tensors that are known to
            be dropped earlier (`graphs.capture.rehearsal`) count only until then.
saved       What autograd saves for a function stays live until the function has run, even if it
            does not read it. What a variable of `forward` holds stays live until the variable is
            reassigned or its function returns.
sums        If a tensor gets several gradients, the engine adds each to the sum so far, in place if
            nothing else refers to the sum (torch/csrc/autograd/input_buffer.cpp).
in place    Some operators overwrite their first argument.
dead code   Operators whose results nobody reads run too, and variables of `forward` may hold these.
            In the backward pass, some compute gradients of leaves that `forward` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphs.graph.parts import RANDOM_STATE
from graphs.graph.step_graph import Graph, Node, Tensor


def as_eager(graph: Graph) -> Graph:
    """The plain step with eager mode's lifetimes and overwriting.

    Nodes get additional inputs, and tensors become aliases, such that freeing each tensor after its
    last use here keeps it live exactly as long as in PyTorch's own step. Names in the meta that the
    graph does not have are ignored.

    Cost: linear in the size of the graph.
    """
    graph = with_dead_code(graph)
    nodes = with_function_lifetimes(
        with_saved(graph.nodes, graph.meta.saved_unread),
        graph.meta.backward_functions,
        dropped=graph.meta.dropped,
    )
    root = _roots(graph, nodes)
    return replace(
        graph,
        nodes=nodes,
        tensors=tuple(
            replace(t, alias_of=None if root[t.name] == t.name else root[t.name])
            for t in graph.tensors
        ),
    )


def without_random_states(graph: Graph) -> Graph:
    """The graph without the random states that a plan may keep: PyTorch's own step keeps none, and
    checkpoints of modules keep other ones."""
    tensors = tuple(t for t in graph.tensors if t.name.rpartition(".")[2] not in _RANDOM_STATES)
    return graph if len(tensors) == len(graph.tensors) else replace(graph, tensors=tensors)


_RANDOM_STATES = (RANDOM_STATE, "random_states")
"""Names of the tensors that count random states; the second, after a prefix, those of other passes
or micro-batches in flight (`graphs.passes`, `graphs.pipeline`)."""


def with_dead_code(graph: Graph) -> Graph:
    """The graph with the results of dead code, of the forward and of the backward pass; the graph
    itself if there are none, or if it has them already."""
    return _with_dead_gradients(_with_dead_results(graph))


def _with_dead_results(graph: Graph) -> Graph:
    """The graph with the results of dead code, each as another output of the forward node before
    it; the graph itself if there are none, or if it has them already."""
    made: dict[str, list[str]] = {}  # forward node -> results of dead code
    forward = {node.name for node in graph.forward_nodes}
    for name, result in graph.meta.dead_results.items():
        if result.get("after") in forward and name not in graph.tensor_by_name:
            made.setdefault(result["after"], []).append(name)
    if not made:
        return graph
    sizes = {name: int(result["size_bytes"]) for name, result in graph.meta.dead_results.items()}
    return replace(
        graph,
        nodes=tuple(
            replace(node, outputs=(*node.outputs, *made.get(node.name, ()))) for node in graph.nodes
        ),
        tensors=(
            *graph.tensors,
            *(Tensor(name, sizes[name], "activation") for names in made.values() for name in names),
        ),
    )


def _with_dead_gradients(graph: Graph) -> Graph:
    """The graph with the gradients of leaves of `forward`: as further results of its nodes, or of
    nodes of no time; the graph itself if there are none."""
    nodes = {node.name: [node] for node in graph.nodes}  # with those that run after it
    tensors: list[Tensor] = []
    for name, made in graph.meta.dead_gradients.items():
        around = nodes.get(str(made.get("after")), [])
        if not around or around[0].phase != "backward" or name in graph.tensor_by_name:
            continue
        tensors.append(Tensor(name, int(made["size_bytes"]), "gradient"))
        if made.get("operator") is None:
            around[0] = replace(around[0], outputs=(*around[0].outputs, name))
        else:
            node = Node(name, str(made["operator"]), (), (name,), 0.0, phase="backward")
            around.append(replace(node, recomputable=False))
    if not tensors:
        return graph
    return replace(
        graph,
        nodes=tuple(each for node in graph.nodes for each in nodes[node.name]),
        tensors=(*graph.tensors, *tensors),
    )


def with_saved(nodes: Sequence[Node], saved: Mapping[str, Sequence[str]]) -> tuple[Node, ...]:
    """The nodes, each of which also reads the tensors that eager mode holds until it has run, if
    nodes of the step make them.

    saved: node -> these tensors.
    """
    made = {name for node in nodes for name in node.outputs}
    return tuple(
        replace(node, inputs=tuple(dict.fromkeys((*node.inputs, *held))))
        if (held := [name for name in saved.get(node.name, ()) if name in made])
        else node
        for node in nodes
    )


def with_function_lifetimes(
    nodes: Sequence[Node], functions: Iterable[Sequence[str]], *, dropped: Mapping[str, str]
) -> tuple[Node, ...]:
    """The nodes, where the last one of each function also reads what the function's other nodes
    read, so that it stays live until the function returns.

    functions: the names of each function's nodes, in order.
    dropped: tensor -> the node up to which it stays live instead.
    """
    node_by_name = {node.name: node for node in nodes}
    made = {name for node in nodes for name in node.outputs}
    for function in functions:
        members = [node_by_name[name] for name in function if name in node_by_name]
        if len(members) > 1:
            names = [member.name for member in members]
            read = dict.fromkeys(n for member in members for n in member.inputs if n in made)
            for name in read:
                until = dropped.get(name, names[-1])
                reader = node_by_name[until if until in names else names[-1]]
                inputs = tuple(dict.fromkeys((*reader.inputs, name)))
                node_by_name[reader.name] = replace(reader, inputs=inputs)
    return tuple(node_by_name[node.name] for node in nodes)


_OUT_ARGUMENTS = {"aten.rrelu_with_noise_functional.default": ((1, 1),)}
"""Operator -> pairs of positions: a result, and the argument that eager mode writes it into."""


def _roots(graph: Graph, nodes: Sequence[Node]) -> dict[str, str]:
    """Tensor -> the tensor whose storage it is on in eager mode."""
    in_place, sums = set(graph.meta.eager_overwrites), set(graph.meta.gradient_sums)
    dead = graph.meta.dead_results.keys() | graph.meta.dead_gradients.keys()
    root = {tensor.name: graph.root(tensor.name) for tensor in graph.tensors}
    last_read = {name: at for at, node in enumerate(nodes) for name in node.inputs}
    kept_storages = {root[name] for name in graph.outputs}
    read_until: dict[str, int] = {}  # storage -> position at which a tensor on it is read last
    for name, at in last_read.items():
        read_until[root[name]] = max(at, read_until.get(root[name], 0))
    for at, node in enumerate(nodes):
        for result, argument in _OUT_ARGUMENTS.get(node.op, ()):  # on the storage of that argument
            out, target = node.outputs[result], node.inputs[argument]
            root[out] = root[target]
            read_until[root[target]] = max(read_until[root[target]], last_read.get(out, at))
        outputs = [name for name in node.outputs if name not in dead]
        if len(outputs) != 1 or not node.inputs:
            continue
        (out,), old = outputs, root[node.inputs[0]]
        # the output is written over the first input: by an in-place operator, or by a sum of
        # gradients if nothing reads the sum so far afterwards
        is_written = node.name in in_place or (
            node.name in sums
            and old in graph.producer
            and old not in kept_storages
            and read_until[old] == at
            and graph.tensor_by_name[old].size_bytes == graph.tensor_by_name[out].size_bytes
        )
        if is_written and graph.tensor_by_name[out].alias_of is None:
            root[out] = old
            read_until[old] = max(read_until.get(old, at), last_read.get(out, at))
            if out in kept_storages:
                kept_storages.add(old)
    return {name: root[of] for name, of in root.items()}
