"""The parts of a graph, tensors and nodes, and the checks of each on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "parameter", "buffer", "optimizer_state", "input", "tangent", "activation", "gradient", "output"
]
Phase = Literal["forward", "outside", "backward", "optimizer"]

KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)
MAX_BYTES = 2**60
"""One exbibyte; a larger tensor is an error in the file."""
MAX_TIME_S = 1e12
"""The longest time of one node: 30,000 years."""


class GraphError(ValueError):
    """The graph is not legal; the message names the field and what would be right."""


DROP = "outputs.dropped"
"""Name of the node at which the caller drops outputs of the model, before the backward pass
(`graphs.training_step.with_dropped_outputs`). It reads all outputs of the model, in order."""

RANDOM_STATE = "random_state"
"""Name of the tensor that counts the bytes of the random states that a step keeps on the CPU."""


@dataclass(frozen=True)
class Tensor:
    """What a node reads or writes.

    name: unique in its graph.
    size_bytes: bytes of its storage. An alias shares its root's storage and adds no bytes.
    kind: shown in reports; the simulator does not use it.
    alias_of: the tensor (itself not an alias) whose storage it shares; None: it has its own.
    """

    name: str
    size_bytes: int
    kind: Kind = "activation"
    alias_of: str | None = None


@dataclass(frozen=True)
class Node:
    """One operator call.

    name: unique in its graph.
    op: the operator, such as "aten.mm.default".
    inputs, outputs: names of tensors. A node without outputs runs for its side effect (a buffer
        update, the optimizer step).
    time_s: seconds of one run.
    workspace_bytes: temporary memory while the operator runs, besides inputs and outputs.
    phase: "forward", "outside" (a loss that the caller computes), "backward" or "optimizer".
    recomputable: whether it can be recomputed with bitwise identical results (forward nodes only;
        all other nodes run once).
    module: path of the module that called it, e.g. "blocks.3.attn".
    overwrites: the input that the node overwrites with its only output, which is an alias on the
        same storage. From then on no node may read what was there. None: it overwrites nothing.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_s: float
    workspace_bytes: int = 0
    phase: Phase = "forward"
    recomputable: bool = True
    module: str = ""
    overwrites: str | None = None


def check_names(items: Sequence[Tensor | Node], *, what: str) -> None:
    """Raise GraphError unless all names are non-empty and unique.

    what: "tensor" or "node", for the message.
    """
    for name, count in Counter(item.name for item in items).items():
        if not name:
            raise GraphError(f"a {what} has an empty name")
        if count > 1:
            raise GraphError(f"two {what}s are called {name!r}; names must be unique")


def check_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> None:
    """Raise GraphError unless size, kind and alias of the tensor are legal.

    tensors: name -> tensor, for all tensors of the graph.
    """
    if not 0 <= tensor.size_bytes <= MAX_BYTES:
        raise GraphError(
            f"tensor {tensor.name!r}: size_bytes is {tensor.size_bytes}; it must be from 0 to 2**60"
        )
    if tensor.kind not in KINDS:
        raise GraphError(
            f"tensor {tensor.name!r}: kind is {tensor.kind!r}; one of {', '.join(KINDS)}"
        )
    if tensor.alias_of is None:
        return
    root = tensors.get(tensor.alias_of)
    if root is None:
        raise GraphError(
            f"tensor {tensor.name!r}: alias_of is {tensor.alias_of!r}, which is not a tensor"
        )
    if root.alias_of is not None:
        raise GraphError(
            f"tensor {tensor.name!r}: alias_of is {root.name!r}, itself an alias of "
            f"{root.alias_of!r}; name the root of the storage"
        )


def check_node(node: Node) -> None:
    """Raise GraphError unless phase, time and workspace of the node are legal."""
    if node.phase not in PHASES:
        raise GraphError(f"node {node.name!r}: phase is {node.phase!r}; one of {', '.join(PHASES)}")
    if not 0 <= node.time_s <= MAX_TIME_S:
        raise GraphError(f"node {node.name!r}: time_s is {node.time_s}; it must be from 0 to 1e12")
    if not 0 <= node.workspace_bytes <= MAX_BYTES:
        raise GraphError(
            f"node {node.name!r}: workspace_bytes is {node.workspace_bytes}; "
            "it must be from 0 to 2**60"
        )
