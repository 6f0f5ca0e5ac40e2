"""What the code of `forward` holds longer than its operators read it.

A variable keeps its tensor until it is assigned again or its function returns; a module's call
keeps the arguments of the module. That is in no graph. So the forward pass runs once on fake
tensors, in eager mode, and it is noted when each storage is freed.
"""

from __future__ import annotations

from graphs.capture.eager_calls import EagerCalls, matched, packet
from graphs.capture.extraction import Layout

_N_AHEAD = 16
"""Calls to look ahead for the next traced operator: eager mode may run others in between."""


def held_by_variables(
    layout: Layout, eager: EagerCalls, *, forward_only: bool = False
) -> dict[str, tuple[str, ...]] | None:
    """Forward node -> tensors that stay until it has run, although no later one reads them.

    eager: of the forward pass, which has returned; its outputs may still be there.
    forward_only: what the backward pass reads does not count as read.

    None: nothing is known where an operator of eager mode is traced as several, by Python code with
    variables of its own (`graphs.capture.as_eager.rnn`).
    """
    if layout.within:
        return None
    nodes = [node for node in layout.nodes if node.phase == "forward" and node.outputs]
    position = {node.name: at for at, node in enumerate(layout.nodes)}
    readers = [n for n in layout.nodes if n.phase == "forward"] if forward_only else layout.nodes
    read_last = {name: position[node.name] for node in readers for name in node.inputs}
    pairs = list(
        matched(
            nodes,
            eager.calls,
            lambda node, call: packet(node.op) == call.name,
            n_ahead=_N_AHEAD,
        )
    )
    node_at = {call.index: node.name for node, call in pairs}
    ran: list[str] = []  # by number of calls: the last matched node that has run by then
    for index in range(len(eager.calls)):
        ran.append(node_at.get(index, ran[-1] if ran else ""))
    held: dict[str, list[str]] = {}
    for node, call in pairs:
        for name, storage in zip(node.outputs, call.storages, strict=False):
            # Its end: freed, or written over. A trace has what a later call writes as another
            # tensor, with an end of its own.
            over = (1 + index for index in eager.written.get(storage, ()) if index > call.index)
            end = min((eager.freed.get(storage, len(eager.calls)), *over))
            until = ran[end - 1]
            if position.get(until, -1) > read_last.get(name, position[node.name]):
                held.setdefault(until, []).append(name)
    return {until: tuple(names) for until, names in held.items()}
