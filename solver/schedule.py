"""The answer: the straight-line list of compute and free operations of one training step.

A schedule names nodes and tensors of one graph (its `graph_id`) and nothing else: no times, no
sizes, no closures. What it costs and whether it is legal is for `solver.simulate` to say. Offload
and prefetch would be further op classes here; until they exist a file that uses them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphs.files import MAX_ENTRIES, FormatError
from graphs.graph import Graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this node, now."""

    node: str


@dataclass(frozen=True, slots=True)
class Free:
    """Drop this tensor from the device, now."""

    tensor: str


Op = Compute | Free


@dataclass(frozen=True)
class Schedule:
    """One training step, operation by operation, for the graph with this id."""

    ops: tuple[Op, ...]
    graph_id: str

    @property
    def order(self) -> tuple[str, ...]:
        """The nodes in the order in which they run, repeats included."""
        return tuple(op.node for op in self.ops if isinstance(op, Compute))

    def ops_to_json(self) -> list[list[str]]:
        return [
            ["compute", op.node] if isinstance(op, Compute) else ["free", op.tensor]
            for op in self.ops
        ]


def ops_from_json(items: Sequence[object], *, source: str) -> tuple[Op, ...]:
    """Read the `ops` of format schedule/1; raises FormatError naming the entry."""
    if len(items) > MAX_ENTRIES:
        raise FormatError(f"{source}: ops has {len(items)} entries; at most {MAX_ENTRIES}")
    return tuple(_op(item, where=f"{source}: ops[{index}]") for index, item in enumerate(items))


def _op(item: object, *, where: str) -> Op:
    if isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) for part in item):
        if item[0] == "compute":
            return Compute(item[1])
        if item[0] == "free":
            return Free(item[1])
    raise FormatError(
        f'{where} is {item!r:.60}; expected ["compute", node name] or ["free", tensor name]'
    )


def free_after_last_use(graph: Graph, order: Iterable[str]) -> Schedule:
    """The schedule that runs these nodes and frees every tensor as early as it can.

    A tensor made by one run of its node is held until the last op that reads it before the next
    run of that node (through any alias of its storage), and outputs of the graph, once made for
    the last time, to the end. No choice of frees for the same order holds less at any moment.

    Cost: linear in the length of the order.
    """
    order = tuple(order)
    members = _members(graph)
    unit_of = {name: unit for unit, names in members.items() for name in names}
    frees_after: list[list[str]] = [[] for _ in order]
    awaited = {unit_of[name] for name in graph.outputs if name in unit_of}
    read_later: set[str] = set()  # units that an op further on reads before they are made again
    for position in range(len(order) - 1, -1, -1):
        node = graph.node_by_name[order[position]]
        made = dict.fromkeys(unit_of[name] for name in node.outputs)
        read = dict.fromkeys(unit_of[name] for name in node.inputs if name in unit_of)
        for unit in {**read, **made}:
            if unit not in read_later and unit not in awaited:
                frees_after[position].append(unit)
            read_later.add(unit)
        for unit in made:
            if graph.producer[unit] is node:
                read_later.discard(unit)
                awaited.discard(unit)
    return Schedule(ops=_with_frees(graph, order, frees_after, members), graph_id=graph.graph_id)


def _members(graph: Graph) -> dict[str, tuple[str, ...]]:
    """What is held and dropped together: each storage made in the step, with all tensors on it.

    An alias of something resident holds nothing and is a unit by itself.
    """
    members: dict[str, list[str]] = {}
    for tensor in graph.tensors:
        if tensor.name in graph.producer:
            root = graph.root(tensor.name)
            members.setdefault(root if root in graph.producer else tensor.name, []).append(
                tensor.name
            )
    return {unit: tuple(names) for unit, names in members.items()}


def _with_frees(
    graph: Graph,
    order: Sequence[str],
    frees_after: Sequence[Sequence[str]],
    members: dict[str, tuple[str, ...]],
) -> tuple[Op, ...]:
    held: set[str] = set()
    ops: list[Op] = []
    outputs = set(graph.outputs)
    last_made = {name: position for position, name in enumerate(order)}
    for position, name in enumerate(order):
        ops.append(Compute(name))
        held.update(graph.node_by_name[name].outputs)
        for unit in frees_after[position]:
            for tensor in members[unit]:
                final = tensor in outputs and last_made[graph.producer[tensor].name] <= position
                if tensor in held and not final:
                    held.discard(tensor)
                    ops.append(Free(tensor))
    return tuple(ops)
