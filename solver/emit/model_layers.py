"""The layers of a model, from the module that each op was called in.

Frameworks checkpoint layers, so their settings are about layers: the numbered members of a
ModuleList or Sequential. PyTorch numbers these members itself, so a number in a module's path is
structure; what the modules are called is not looked at. What a part of a layer is for follows from
the operators in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphs.graph import Graph, Node

FUSED_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kind}.default"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "attention_math",
    )
)
PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})
"""Of linear layers."""
BATCHED_PRODUCTS = frozenset({"aten.bmm.default", "aten.baddbmm.default"})


class NoLayersError(ValueError):
    """The graph does not say what its layers are; the message says what would."""


@dataclass(frozen=True)
class Layer:
    """path: of its module. nodes: forward nodes in graph order. parts: the same by submodule."""

    path: str
    nodes: tuple[Node, ...]
    parts: Mapping[str, tuple[Node, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)


def layers(graph: Graph) -> tuple[Layer, ...]:
    """The layers in the order in which they run: the outermost numbered modules, of at least two.

    Raises NoLayersError.
    """
    nodes_of: dict[str, list[Node]] = {}
    for node in graph.forward_nodes:
        path = _outermost(node.module or "")
        if path:
            nodes_of.setdefault(path, []).append(node)
    if len(nodes_of) < 2:
        reason = "has no numbered modules (nn.ModuleList, nn.Sequential), at least two of them"
        if not any(node.module for node in graph.nodes):
            reason = "does not say of which module each op is; give the model file instead"
        raise NoLayersError(f"the layers of the model are not known: the graph {reason}")
    return tuple(Layer(path, tuple(nodes), _parts(path, nodes)) for path, nodes in nodes_of.items())


def _outermost(path: str) -> str:
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def _parts(path: str, nodes: Iterable[Node]) -> dict[str, tuple[Node, ...]]:
    found: dict[str, list[Node]] = {}
    for node in nodes:
        below = (node.module or "").removeprefix(path).removeprefix(".").partition(".")[0]
        if below:
            found.setdefault(below, []).append(node)
    return {name: tuple(members) for name, members in found.items()}


def attention_nodes(layer: Layer) -> tuple[Node, ...]:
    """The fused attention of a layer; none where attention is written out."""
    return tuple(node for node in layer.nodes if node.op in FUSED_ATTENTION)


def mlp_parts(layer: Layer) -> tuple[tuple[Node, ...], ...]:
    """Submodules with at least two linear layers and no attention."""
    return tuple(
        nodes
        for nodes in layer.parts.values()
        if sum(node.op in PRODUCTS for node in nodes) >= 2
        and not any(node.op in FUSED_ATTENTION | BATCHED_PRODUCTS for node in nodes)
    )


def norm_parts(graph: Graph, layer: Layer) -> tuple[tuple[Node, ...], ...]:
    """Submodules that read a parameter and have no product of matrices."""
    multiplies = FUSED_ATTENTION | BATCHED_PRODUCTS | PRODUCTS
    return tuple(
        nodes
        for nodes in layer.parts.values()
        if not any(node.op in multiplies for node in nodes)
        and any(_reads_parameter(graph, node) for node in nodes)
    )


def _reads_parameter(graph: Graph, node: Node) -> bool:
    return any(graph.tensor_by_name[graph.root(n)].kind == "parameter" for n in node.inputs)
