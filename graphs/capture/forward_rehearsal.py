"""Finds tensors that the code of `forward` holds after the last operator that reads them has run.

A variable keeps its tensor alive until it is assigned again or its function returns, and a module's
call keeps its arguments alive. No graph shows that. So the forward pass runs once in eager mode on
fake tensors, and it is recorded when each storage is freed.
"""

from __future__ import annotations

from graphs.capture.eager_calls import EagerCalls, matching_pairs, operator_name
from graphs.capture.extraction import Layout

_N_LOOK_AHEAD = 16
"""How many eager calls to look ahead for the next traced operator: others may be in between."""


def held_by_variables(
    layout: Layout, eager: EagerCalls, *, forward_only: bool = False
) -> dict[str, tuple[str, ...]] | None:
    """Forward node -> tensors that stay alive until it has run, after their last reader.

    Returns None (not known) if an operator of eager mode is traced as several operators, by Python
    code with variables of its own (`graphs.capture.as_eager.rnn`).

    eager: the calls of the forward pass, which has returned; its outputs may still be alive.
    forward_only: whether to ignore that the backward pass reads tensors.
    """
    if layout.held_within_call:
        return None
    nodes = [node for node in layout.nodes if node.phase == "forward" and node.outputs]
    position = {node.name: at for at, node in enumerate(layout.nodes)}
    readers = [n for n in layout.nodes if n.phase == "forward"] if forward_only else layout.nodes
    read_last = {name: position[node.name] for node in readers for name in node.inputs}
    pairs = list(
        matching_pairs(
            nodes,
            eager.calls,
            lambda node, call: operator_name(node.op) == call.name,
            n_look_ahead=_N_LOOK_AHEAD,
        )
    )
    node_at = {call.index: node.name for node, call in pairs}
    last_run: list[str] = []  # for each call: the last matched node that has run when it ends
    for index in range(len(eager.calls)):
        last_run.append(node_at.get(index, last_run[-1] if last_run else ""))
    held: dict[str, list[str]] = {}
    for node, call in pairs:
        for name, storage in zip(node.outputs, call.storages, strict=False):
            # The tensor ends when its storage is freed or overwritten: in a trace, what a later
            # call writes is another tensor, with an end of its own.
            overwritten_at = (
                1 + index for index in eager.written.get(storage, ()) if index > call.index
            )
            end = min((eager.freed.get(storage, len(eager.calls)), *overwritten_at))
            until = last_run[end - 1]
            if position.get(until, -1) > read_last.get(name, position[node.name]):
                held.setdefault(until, []).append(name)
    return {until: tuple(names) for until, names in held.items()}
