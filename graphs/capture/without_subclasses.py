"""What backward functions overwrite where no tensor is of a subclass.

Formulas of PyTorch ask `areAnyTensorSubclassLike`: if so, they take operators that make new tensors
in place of operators in place (torch/csrc/autograd/FunctionsManual.cpp, ATen/native). In a trace
and in a rehearsal on fake tensors the answer is yes, in a training step it is no. The results are
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphs.capture.eager_calls import packet
from graphs.capture.extraction import Layout

_ZEROS = frozenset({"aten.zeros", "aten.new_zeros", "aten.zeros_like"})
_SCATTERS = frozenset(
    f"aten.{name}" for name in ("scatter", "scatter_add", "index_add", "index_put", "put")
)
"""Of gradients, into zeros that the same function has made: of `gather`, `index_select`, `sort`,
`max` and `median` over a dimension, `cummax`, `take`."""

_BINARY_CROSS_ENTROPY = "aten.binary_cross_entropy_with_logits"
_IN_PLACE_THERE = frozenset({"aten.sub", "aten.mul", "aten.div"})


def without_subclasses(layout: Layout) -> Iterator[str]:
    """Backward nodes that overwrite their first input in a training step."""
    node_by_name = {node.name: node for node in layout.nodes}
    operator = {
        call.meta.get("seq_nr"): packet(str(call.target))
        for name, call in layout.calls.items()
        if node_by_name[name].phase == "forward"
    }
    for number, names in layout.functions.items():
        is_loss = operator.get(number) == _BINARY_CROSS_ENTROPY
        zeros: set[str] = set()
        made: set[str] = set()
        for name in names:
            node = node_by_name[name]
            op = packet(node.op)
            first = node.inputs[0] if node.inputs else ""
            if (op in _SCATTERS and first in zeros) or (
                is_loss and op in _IN_PLACE_THERE and first in made
            ):
                yield name
            if op in _ZEROS:
                zeros |= set(node.outputs)
            made |= set(node.outputs)
