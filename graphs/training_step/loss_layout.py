"""The nodes of a loss that the caller computes, as eager mode runs them.

The caller runs these nodes in eager mode even if the model runs a plan. So what eager mode
overwrites, holds longer or drops early is part of the graph itself. For the model's own nodes it is
added only for the baseline (`graphs.graph.eager_memory`), since a plan runs them one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.capture import Layout, Rehearsed
from graphs.graph import with_saved


@dataclass(frozen=True)
class LossLayout:
    """The nodes and tensors of a loss.

    layout: a node that overwrites its input has no output; the tensors that occupy one storage one
        after the other have a single name.
    dropped: as `Rehearsed.dropped`, with these names.
    """

    layout: Layout
    dropped: Mapping[str, str]

    @classmethod
    def of(cls, layout: Layout, rehearsed: Rehearsed) -> LossLayout:
        """The layout of a loss with what the rehearsal found.

        layout: as extracted, in which each node makes a tensor of its own.
        """
        nodes_with_saved = with_saved(layout.nodes, rehearsed.saved)
        layout = dataclasses.replace(layout, nodes=list(nodes_with_saved))
        final = _final_names(layout, rehearsed.in_place)
        nodes = []
        for node in layout.nodes:  # an output that is now the same tensor as an input is dropped
            inputs = tuple(dict.fromkeys(final.get(name, name) for name in node.inputs))
            outputs = (final.get(name, name) for name in node.outputs)
            new_outputs = tuple(name for name in outputs if name not in inputs)
            nodes.append(dataclasses.replace(node, inputs=inputs, outputs=new_outputs))
        storage = {node: final.get(name, name) for node, name in layout.storage.items()}
        tensors = [tensor for tensor in layout.tensors if tensor.name not in final]
        dropped = {final.get(name, name): node for name, node in rehearsed.dropped.items()}
        layout = dataclasses.replace(layout, nodes=nodes, tensors=tensors, storage=storage)
        return cls(layout, dropped)


def _final_names(layout: Layout, in_place: Sequence[str]) -> dict[str, str]:
    """Tensor that is overwritten -> the last tensor on its storage.

    Considers only tensors that the loss's backward pass makes, overwritten by their last reader.
    All other in-place results count as new tensors, which can only overestimate memory.
    """
    made = {out for node in layout.nodes if node.phase == "backward" for out in node.outputs}
    last_reader = {name: node.name for node in layout.nodes for name in node.inputs}
    size_bytes = {tensor.name: tensor.size_bytes for tensor in layout.tensors}
    final: dict[str, str] = {}
    for node in reversed(layout.nodes):
        if node.name not in in_place or len(node.outputs) != 1 or not node.inputs:
            continue
        (out,), old = node.outputs, node.inputs[0]
        is_dying = last_reader[old] == node.name and old not in layout.outputs
        if is_dying and old in made and size_bytes[old] == size_bytes[out]:
            final[old] = final.get(out, out)
    return final
