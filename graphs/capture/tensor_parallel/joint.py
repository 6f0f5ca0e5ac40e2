"""A joint graph of DTensors' local parts, as if the parts had been its parameters all along.

AOTAutograd takes each DTensor apart into its local tensor and its mesh, and while it traces,
DTensor waits for each collective at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch.utils import _pytree as pytree

from graphs.model_calls import TraceError


def of_local_parts(graph: torch.fx.Graph) -> None:
    """Drop meshes, describe a local part as the tensor that it is of, and fold the waits."""
    output = graph.output_node()
    described = list(output.meta["desc"])
    values = list(pytree.tree_leaves(output.args[0], is_leaf=lambda item: item is None))
    output.args = ([v for v, d in zip(values, described, strict=True) if _is_kept(d)],)
    output.meta["desc"] = [_whole(desc) for desc in described if _is_kept(desc)]
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if _is_kept(desc):
            node.meta["desc"] = _whole(desc)
        elif node.users:
            raise TraceError(f"forward computes with the mesh of a DTensor ({node.name})")
        else:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_WAIT):
        # `wait_tensor` returns the tensor that it is given; a fake one makes a copy of it
        (made,) = node.all_input_nodes
        made.meta["val"] = node.meta["val"]


_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OF_SUBCLASS = (descriptors.SubclassGetAttrAOTInput, descriptors.SubclassGetAttrAOTOutput)


def _is_kept(desc: Any) -> bool:
    return not isinstance(desc, _OF_SUBCLASS) or desc.attr == "_local_tensor"


def _whole(desc: Any) -> Any:
    return desc.base if isinstance(desc, _OF_SUBCLASS) else desc
