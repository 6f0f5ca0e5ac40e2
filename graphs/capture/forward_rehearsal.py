"""What the code of `forward` holds longer than its operators read it.

A variable keeps its tensor until it is assigned again or its function returns; a module's call
keeps the arguments of the module. That is in no graph. So the forward pass runs once on fake
tensors, in eager mode, and it is noted when each storage is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from graphs.capture.eager_calls import EagerCall, EagerCalls, packet
from graphs.capture.extraction import Layout
from graphs.graph import Node

N_AHEAD = 16
"""Calls to look ahead for the next traced operator, and traced ones for the next call."""


class ForwardCalls(EagerCalls):  # type: ignore[no-untyped-call]
    """While entered, records all operators, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[EagerCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if (call := self.noted(func, args, kwargs or {}, value)) is not None:
            self.calls.append(call)
        return value


def held_by_variables(layout: Layout, calls: ForwardCalls) -> dict[str, tuple[str, ...]]:
    """Forward node -> tensors that stay until it has run, although no later one reads them.

    calls: of the forward pass, which has returned; its outputs may still be there.

    Nothing is known where an operator of eager mode is traced as several, by Python code with
    variables of its own (`graphs.capture.as_eager.rnn`).
    """
    if layout.within:
        return {}
    nodes = [node for node in layout.nodes if node.phase == "forward" and node.outputs]
    position = {node.name: at for at, node in enumerate(layout.nodes)}
    read_last = {name: position[node.name] for node in layout.nodes for name in node.inputs}
    matched = list(_matched(nodes, calls.calls))
    node_at = {call.index: node.name for node, call in matched}
    ran: list[str] = []  # by number of calls: the last matched node that has run by then
    for index in range(calls.n_calls):
        ran.append(node_at.get(index, ran[-1] if ran else ""))
    held: dict[str, list[str]] = {}
    for node, call in matched:
        for name, storage in zip(node.outputs, call.storages, strict=False):
            until = ran[_end(call, storage, calls) - 1]
            if position.get(until, -1) > read_last.get(name, position[node.name]):
                held.setdefault(until, []).append(name)
    return {until: tuple(names) for until, names in held.items()}


def _end(call: EagerCall, storage: int, calls: ForwardCalls) -> int:
    """How many calls have run when what a call has put into a storage is gone: freed, or written
    over. A trace has what a later call writes as another tensor, with an end of its own."""
    over = (1 + index for index in calls.written.get(storage, ()) if index > call.index)
    return min((calls.freed.get(storage, calls.n_calls), *over))


def _matched(nodes: Sequence[Node], calls: Sequence[EagerCall]) -> Iterator[tuple[Node, EagerCall]]:
    """Nodes and calls of the same operators, both in order; the others are left out."""
    start = 0
    for node in nodes:
        name = packet(node.op)
        for at, call in enumerate(islice(calls, start, start + N_AHEAD), start):
            if call.name == name:
                yield node, call
                start = at + 1
                break
