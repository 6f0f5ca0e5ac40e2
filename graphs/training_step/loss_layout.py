"""The nodes of a loss that the caller computes, with what eager mode overwrites and drops early.

The caller runs these nodes in eager mode, with a plan as well, so the graph itself says it. For the
model's own nodes `graphs.graph.eager_memory` does, since a plan runs them one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.capture import Layout, Rehearsed
from graphs.graph import with_saved


@dataclass(frozen=True)
class LossLayout:
    """layout: a node that overwrites a tensor of the loss makes none; what it writes has one name.
    dropped: as `Rehearsed.dropped` has it, with these names.
    """

    layout: Layout
    dropped: Mapping[str, str]

    @classmethod
    def of(cls, layout: Layout, rehearsed: Rehearsed) -> LossLayout:
        """layout: as extracted, where each node makes a tensor of its own."""
        saving = with_saved(layout.nodes, rehearsed.saved)
        layout = dataclasses.replace(layout, nodes=list(saving))
        final = _final_names(layout, rehearsed.in_place)
        nodes = []
        for node in layout.nodes:  # an output that is one of the inputs is none
            inputs = tuple(dict.fromkeys(final.get(name, name) for name in node.inputs))
            outputs = (final.get(name, name) for name in node.outputs)
            made = tuple(name for name in outputs if name not in inputs)
            nodes.append(dataclasses.replace(node, inputs=inputs, outputs=made))
        storage = {node: final.get(name, name) for node, name in layout.storage.items()}
        tensors = [tensor for tensor in layout.tensors if tensor.name not in final]
        dropped = {final.get(name, name): node for name, node in rehearsed.dropped.items()}
        layout = dataclasses.replace(layout, nodes=nodes, tensors=tensors, storage=storage)
        return cls(layout, dropped)


def _final_names(layout: Layout, in_place: Sequence[str]) -> dict[str, str]:
    """Tensor that is overwritten -> the last one on its storage.

    Only what the backward pass of the loss makes and reads for the last time is overwritten here;
    elsewhere the result counts as new, which is at most too much.
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
