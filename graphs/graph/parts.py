"""The parts of a graph: tensors and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "parameter", "buffer", "optimizer_state", "input", "tangent", "activation", "gradient", "output"
]
Phase = Literal["forward", "outside", "backward", "optimizer"]

KINDS: tuple[str, ...] = get_args(Kind)
PHASES: tuple[str, ...] = get_args(Phase)


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
    copyable: whether its storage may be copied to host memory or disk. An alias has no say.
    """

    name: str
    size_bytes: int
    kind: Kind = "activation"
    alias_of: str | None = None
    copyable: bool = True


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
