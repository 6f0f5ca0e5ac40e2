"""What a loss of the caller overwrites and drops, in its nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from graphs.capture import Layout, Rehearsed
from graphs.graph import Graph, Node, Tensor
from graphs.trace import trace
from graphs.training_step.outside_loss import LossLayout


def layout(*, reader_of_s: str = "mul", outputs: tuple[str, ...] = ("m",)) -> Layout:
    """s = sigmoid(x), then s - t and (s - t) * g; `read` reads what is named last of all."""
    wiring = (
        ("sigmoid", "s", ("x",)),
        ("sub", "d", ("s", "t")),
        ("mul", "m", ("d", "g")),
        *((("read", "r", (reader_of_s,)),) if reader_of_s != "mul" else ()),
    )
    return Layout(
        nodes=[Node(n, f"op.{n}", read, (out,), 1.0, phase="backward") for n, out, read in wiring],
        tensors=[Tensor(out, 4, "activation") for _, out, _ in wiring],
        outputs=list(outputs),
    )


IN_PLACE = Rehearsed(in_place=("sub", "mul"), dropped={"s": "sub", "d": "sub"})


def wires(found: LossLayout) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {node.name: (node.inputs, node.outputs) for node in found.layout.nodes}


def test_what_is_overwritten_in_a_row_is_one_tensor_under_the_last_name() -> None:
    found = LossLayout.of(layout(), IN_PLACE)
    assert wires(found) == {
        "sigmoid": (("x",), ("m",)),
        "sub": (("m", "t"), ()),
        "mul": (("m", "g"), ()),
    }
    assert [tensor.name for tensor in found.layout.tensors] == ["m"]
    assert found.dropped == {"m": "sub"}


def test_what_is_read_later_or_returned_is_not_overwritten() -> None:
    for given in (layout(reader_of_s="s"), layout(outputs=("s", "m"))):
        found = wires(LossLayout.of(given, IN_PLACE))
        assert found["sub"] == (("s", "t"), ("m",))
        assert found["mul"] == (("m", "g"), ())


def test_a_loss_outside_takes_what_its_code_takes() -> None:
    """sigmoid(x).sub_(target).mul_(grad).div_(n): one tensor, which becomes the gradient."""
    model, batch = nn.Linear(4, 8), (torch.randn(16, 4), torch.rand(16, 8))
    graph: Graph = trace(
        model,
        batch,
        loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[1]),
        inputs=lambda batch: batch[0],
    )
    (gradient,) = (
        tensor.name
        for tensor in graph.tensors
        if tensor.kind == "tangent" and tensor.name in graph.producer
    )
    assert graph.producer[gradient].op == "aten.sigmoid.default"
    written = [n for n in graph.nodes if n.phase == "outside" and not n.outputs]
    assert [n.op for n in written] == ["aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Scalar"]
    assert all(gradient in n.inputs for n in written)
    assert written[-1].inputs == (gradient,)  # what the function read and made before is gone
