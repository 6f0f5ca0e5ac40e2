"""The fake DTensors that stand for a module's own inside of a trace.

AOTAutograd takes them apart: the traced program has this rank's parts as its inputs and outputs,
and DTensor's own dispatch has turned each operator into local ones and collectives. How DTensor
places a gradient (as partial sums, say, or whole) is in none of these: it is noted here. While it
traces, DTensor waits for each collective at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch.utils import _pytree as pytree

from graphs.model_calls import TraceError


def with_part(like: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor that is placed as `like` is, with this local part; it requires no gradient."""
    made: torch.Tensor = type(like)(part, like._spec, requires_grad=False)
    return made


def forget_placements() -> None:
    """Forget how DTensor has placed the results of earlier calls.

    A vocabulary split over the ranks is placed with a mask, that of the rows which this rank lacks,
    from the lookup until its results are summed. A trace that was given up in between leaves its
    mask, on fake tensors, in what DTensor remembers.
    """
    from torch.distributed.tensor import debug

    clear: Any = debug._clear_sharding_prop_cache
    clear()


def gradient_noted(tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
    """The DTensor. note: called with the spec (mesh, placements, shape, strides) of its gradient
    in the backward pass."""
    apply: Any = _GradientNoted.apply
    same: torch.Tensor = apply(tensor, note)
    return same


class _GradientNoted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
        ctx.note = note
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.note(gradient._spec)
        return gradient, None


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
            continue
        for user in list(node.users):
            if not user.users:  # what is no longer returned: an equal mesh that DTensor remembers
                graph.erase_node(user)
        if node.users:
            raise TraceError(f"forward computes with the mesh of a DTensor ({node.name})")
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
