"""What to recompute ahead of time, where just in time is too late.

The device may be fullest right before the first run of a node, and what the node reads may take
recomputation for which there is no room then: for example the MLPs of all blocks below the one
whose MLP runs backward. Then something on the way must be on the device already: a *gate*, a unit
through which all paths lead from the node's inputs to what has no room (a dominator of the graph of
reads). It is recomputed at the last position with enough room, and held.

Room is judged by what every schedule holds (`StorageGraph.held_bytes`). So a gate may still fail;
and if there is none, recomputing several units ahead of time might work.

Cost: linear in the graph for each gate that is tried, rarely more than one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from solver.bound import StorageGraph


@dataclass(frozen=True)
class Gate:
    """A unit to recompute right before the first run of node `since`, and hold up to `until`."""

    unit: int
    since: int
    until: int


def gates_for(folded: StorageGraph, q: int, *, budget_bytes: int) -> Iterator[Gate]:
    """Yield gates for the inputs of node q, the smallest first; none if everything has room.

    Gates for nodes that do not fit even alone come before those for nodes that do not fit beside
    the other inputs of q.
    """
    if q >= folded.n_nodes:
        return
    room = budget_bytes - int(folded.held_bytes[q])
    wanted = [
        u
        for u in folded.reads[q]
        if folded.maker[u] < folded.n_forward and not folded.is_pinned(u, q)
    ]
    nodes = _nodes_for(folded, wanted, q)
    for held in ([], wanted):
        without_room = set()
        for n in nodes:
            held_besides = {*held}.difference(folded.reads[n], folded.makes[n])
            if int(folded.run_bytes[n]) + sum(folded.unit_bytes[u] for u in held_besides) > room:
                without_room.add(n)
        gate_units = _units_of_gates(folded, nodes, wanted, without_room) if without_room else ()
        for u in sorted(gate_units, key=lambda u: (folded.unit_bytes[u], u)):
            since = _last_position_with_room(folded, u, q, budget_bytes)
            if since is not None and without_room.isdisjoint(_nodes_for(folded, wanted, q, held=u)):
                yield Gate(u, since, q)


def _units_of_gates(
    folded: StorageGraph, nodes: Collection[int], wanted: Iterable[int], without_room: Iterable[int]
) -> list[int]:
    """Units made by nodes through which all paths from the wanted units to a large node lead."""
    import networkx  # here: takes 0.1 s, and few searches need it

    start, end = -1, folded.n_nodes
    reads = networkx.DiGraph((start, folded.maker[u]) for u in wanted)
    for n in nodes:
        makers = (folded.maker[u] for u in folded.reads[n])
        reads.add_edges_from((n, maker) for maker in makers if maker in nodes)
    reads.add_edges_from((n, end) for n in without_room)
    dominators = networkx.immediate_dominators(reads, start)
    gates: list[int] = []
    n = dominators[end]
    while n != start:
        gates += (u for u in folded.makes[n] if folded.uses[u])
        n = dominators[n]
    return gates


def _last_position_with_room(folded: StorageGraph, u: int, q: int, budget_bytes: int) -> int | None:
    """The last position before q with room to recompute u and to hold it from there on.

    All of u's inputs may be missing then. None: there is no such position in the backward pass.
    """
    run_bytes = max((folded.run_bytes[n] for n in _nodes_for(folded, [u], q)), default=0)
    for p in range(q - 1, folded.n_forward - 1, -1):
        held_bytes = 0 if folded.must_be_on_device(u, p) else folded.unit_bytes[u]
        if folded.least_bytes[p] + held_bytes > budget_bytes:
            return None
        if folded.held_bytes[p] + run_bytes <= budget_bytes:
            return p
    return None


def _nodes_for(
    folded: StorageGraph, units: Iterable[int], q: int, *, held: int | None = None
) -> set[int]:
    """Nodes to run for these units right before q, with only `held` and pinned units there."""
    return folded.nodes_to_make(units, is_there=lambda u: u == held or folded.is_pinned(u, q))
