"""Fake DTensors that stand for a module's own DTensors in a trace.

AOTAutograd takes them apart: the traced program has this rank's parts as its inputs and outputs,
and DTensor's dispatch has turned each operator into local operators and collectives. The program
does not show how DTensor places a gradient (as partial sums, say, or whole), so this is recorded
here. While it is traced, DTensor waits for each collective at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd import descriptors
from torch.utils import _pytree as pytree

from graphs.model_calls import TraceError


def with_local_part(like: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor with this local part and the placement of `like`; it requires no gradient."""
    made: torch.Tensor = type(like)(part, like._spec, requires_grad=False)
    return made


@contextlib.contextmanager
def meshes_on(device: torch.device | None) -> Iterator[None]:
    """While inside, every mesh reports this device (None: its own).

    A mesh says on which device its ranks compute, and DTensor moves its arguments there. When a
    rank is planned without the others, its mesh is of CPUs, whatever device the plan is for.

    Random operators remain those of the mesh's own device: for another device, DTensor would
    install a tracker of random states, which would stay afterwards.
    """
    if device is None:
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _dispatch

    original: Any = _dispatch.is_rng_supported_mesh

    def is_supported(mesh: Any) -> bool:
        return mesh._device_type == device.type and bool(original(mesh))

    with (
        mock.patch.object(DeviceMesh, "device_type", property(lambda _mesh: device.type)),
        mock.patch.object(_dispatch, "is_rng_supported_mesh", is_supported),
    ):
        yield


def forget_placements() -> None:
    """Clear DTensor's cache of how it has placed the results of earlier calls.

    If a vocabulary is split over the ranks, a placement holds a mask of the rows that this rank
    lacks, from the embedding lookup until the results are summed. A trace that failed in between
    leaves its mask, a fake tensor, in the cache.
    """
    from torch.distributed.tensor import debug

    clear: Any = debug._clear_sharding_prop_cache
    clear()


def report_gradient_placement(tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
    """Pass a DTensor on, and report how its gradient is placed.

    note: called in the backward pass with the gradient's spec (mesh, placements, shape, strides).
    """
    apply: Any = _GradientPlacementReport.apply
    same: torch.Tensor = apply(tensor, note)
    return same


class _GradientPlacementReport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
        ctx.note = note
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.note(gradient._spec)
        return gradient, None


def rewrite_for_local_parts(graph: torch.fx.Graph) -> None:
    """Rewrite a graph that AOTAutograd has traced from DTensors, in place.

    Meshes are dropped from inputs and outputs, a local part gets the descriptor of its DTensor, and
    the result of `wait_tensor` counts as a view of its argument. Raises TraceError if the graph
    computes with a mesh.
    """
    output = graph.output_node()
    descs = list(output.meta["desc"])
    values = list(pytree.tree_leaves(output.args[0], is_leaf=lambda item: item is None))
    output.args = ([v for v, d in zip(values, descs, strict=True) if _is_kept(d)],)
    output.meta["desc"] = [_descriptor_of_dtensor(desc) for desc in descs if _is_kept(desc)]
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if _is_kept(desc):
            node.meta["desc"] = _descriptor_of_dtensor(desc)
            continue
        for user in list(node.users):
            if not user.users:  # no longer returned: an equal mesh that DTensor has cached
                graph.erase_node(user)
        if node.users:
            raise TraceError(f"forward computes with the mesh of a DTensor ({node.name})")
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_WAIT):
        # `wait_tensor` returns its argument; its meta function makes a new tensor.
        (argument,) = node.all_input_nodes
        argument.meta["val"] = node.meta["val"]


_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SUBCLASS_DESCRIPTORS = (descriptors.SubclassGetAttrAOTInput, descriptors.SubclassGetAttrAOTOutput)


def _is_kept(desc: Any) -> bool:
    """Whether an input or output stays: all but the meshes and other attributes of DTensors."""
    return not isinstance(desc, _SUBCLASS_DESCRIPTORS) or desc.attr == "_local_tensor"


def _descriptor_of_dtensor(desc: Any) -> Any:
    """The descriptor of the DTensor that a local part belongs to."""
    return desc.base if isinstance(desc, _SUBCLASS_DESCRIPTORS) else desc
