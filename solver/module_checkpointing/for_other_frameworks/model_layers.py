"""Find the layers of a model, from the module path of each op.

Frameworks checkpoint layers, so their settings refer to layers: the numbered members of a
ModuleList or Sequential. PyTorch itself assigns these numbers, so a number in a module path is
structure; names of modules are not interpreted. The role of a part of a layer (attention, MLP,
norm) is inferred from its operators.
"""

from __future__ import annotations

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
"""Matrix products of linear layers."""
BATCHED_PRODUCTS = frozenset({"aten.bmm.default", "aten.baddbmm.default"})


class NoLayersError(ValueError):
    """The layers cannot be found in the graph; the message says what is missing."""


@dataclass(frozen=True)
class Layer:
    """A layer: the path of its module, and its forward nodes in graph order."""

    path: str
    nodes: tuple[Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def parts(self) -> list[list[Node]]:
        """The nodes of each direct submodule, without nodes called by the layer itself."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            below = node.module.removeprefix(self.path).removeprefix(".").partition(".")[0]
            if below:
                found.setdefault(below, []).append(node)
        return list(found.values())


def layers(graph: Graph) -> tuple[Layer, ...]:
    """The layers in the order in which they run: the outermost numbered modules.

    Raises NoLayersError if there are fewer than two.
    """
    nodes_of: dict[str, list[Node]] = {}
    for node in graph.forward_nodes:
        parts = node.module.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            nodes_of.setdefault(".".join(parts[: number + 1]), []).append(node)
    if len(nodes_of) < 2:
        reason = "has no numbered modules (nn.ModuleList, nn.Sequential), at least two of them"
        if not any(node.module for node in graph.nodes):
            reason = "does not say which module each op belongs to; give the model file instead"
        raise NoLayersError(f"the layers of the model are not known: the graph {reason}")
    return tuple(Layer(path, tuple(nodes)) for path, nodes in nodes_of.items())


def attention_nodes(layer: Layer) -> list[Node]:
    """The fused attention ops of a layer; empty if attention is made of single operators."""
    return [node for node in layer.nodes if node.op in FUSED_ATTENTION]


def mlp_parts(layer: Layer) -> list[list[Node]]:
    """The nodes of submodules with at least two linear layers and no attention."""
    return [
        nodes
        for nodes in layer.parts
        if sum(node.op in PRODUCTS for node in nodes) >= 2
        and not any(node.op in FUSED_ATTENTION | BATCHED_PRODUCTS for node in nodes)
    ]


def norm_parts(graph: Graph, layer: Layer) -> list[list[Node]]:
    """The nodes of submodules that read a parameter and have no matrix product."""

    def reads_parameter(node: Node) -> bool:
        roots = (graph.tensor_by_name[graph.root(name)] for name in node.inputs)
        return any(root.kind == "parameter" for root in roots)

    multiplies = FUSED_ATTENTION | BATCHED_PRODUCTS | PRODUCTS
    return [
        nodes
        for nodes in layer.parts
        if not any(node.op in multiplies for node in nodes) and any(map(reads_parameter, nodes))
    ]
