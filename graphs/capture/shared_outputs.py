"""Outputs that share memory with other outputs: `return logits, logits.t()`.

AOTAutograd expects one gradient for the tensor that such outputs are views of. A planned step takes
one for each output: then the views' own backward functions and the sum of their gradients are in
the traced backward pass, in the order in which eager mode's engine runs them. So while a step is
traced, each of these outputs passes through an operator whose result seems to be new memory;
afterwards the output itself takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.model_calls import TraceError, nested, strided_like

_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("returned(Tensor output) -> Tensor")
_library.impl("returned", strided_like, "Meta")
_returned = torch.ops.checkpoint_solver.returned.default


class _Returned(torch.autograd.Function):
    """The output as if it had memory of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> Any:
        return _returned(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def storage_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def title(index: int, spec: nested.Spec) -> str:
    """Of a flat output, for messages: "output ['logits'] of the model"."""
    return f"output {pytree.keystr(nested.paths(spec)[index]) or index} of the model"


def refuse_twins(outputs: Sequence[Any], chosen: Sequence[int], spec: nested.Spec) -> None:
    """Raise TraceError for a tensor that gets a gradient and is returned twice: eager mode adds up
    its gradients in the order of the loss, whichever output they are of.
    """
    first: dict[int, int] = {}
    for index, item in enumerate(outputs):
        if not isinstance(item, torch.Tensor):
            continue
        twin = first.setdefault(id(item), index)
        if twin != index and (index in chosen or twin in chosen):
            raise TraceError(
                f"{title(index, spec)} is the same tensor as {title(twin, spec)}, and one of them "
                "gets a gradient; return it once, or a view of it (x.view_as(x))"
            )


def of_their_own(outputs: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """The flat outputs for a trace: those that get a gradient seem to have memory of their own."""
    n_sharing = Counter(storage_of(item) for item in outputs if isinstance(item, torch.Tensor))
    return [
        _Returned.apply(item)  # type: ignore[no-untyped-call]
        if index in chosen and n_sharing[storage_of(item)] > 1
        else item
        for index, item in enumerate(outputs)
    ]


def share_again(graph: torch.fx.Graph) -> None:
    """The outputs take the places of what stands for them."""
    for node in graph.find_nodes(op="call_function", target=_returned):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
