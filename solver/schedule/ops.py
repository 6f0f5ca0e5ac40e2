"""The schedule: the straight-line list of operations of one training step.

A schedule names nodes and tensors of one graph (its `graph_id`) and nothing else: no times, no
sizes, no closures. `solver.simulate` says what it costs and whether it is legal.

`Compute` and `Free` act on the device. A storage may also be copied to host memory and from there
to a disk, and each copy is given up by an op of its own:

    device  --Store-->  host  --Spill-->  disk
    device  <--Fetch--  host  <--Load---  disk
     Free               Drop              Delete

A copy leaves its source where it is. These ops name a storage by its root tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphs.files import MAX_ENTRIES, FormatError
from graphs.graph import Graph
from solver.sizes_deadlines_progress import counted


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this node."""

    node: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free this tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Store:
    """Copy this storage from the device to the host."""

    storage: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy this storage from the host to the device."""

    storage: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up the host's copy of this storage."""

    storage: str


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy this storage from the host to the disk."""

    storage: str


@dataclass(frozen=True, slots=True)
class Load:
    """Copy this storage from the disk to the host."""

    storage: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Give up the disk's copy of this storage."""

    storage: str


Copy = Store | Fetch | Spill | Load
Op = Compute | Free | Copy | Drop | Delete

WORDS: Mapping[str, Callable[[str], Op]] = {
    "compute": Compute,
    "free": Free,
    "store": Store,
    "fetch": Fetch,
    "drop": Drop,
    "spill": Spill,
    "load": Load,
    "delete": Delete,
}
"""The word in a schedule file -> the op's class, which takes the name that follows the word."""
_WORD_OF = {kind: word for word, kind in WORDS.items()}


def word_for(op: Op) -> str:
    """The word for this kind of op in a schedule file."""
    return _WORD_OF[type(op)]


def name_in(op: Op) -> str:
    """The node, tensor or storage that the op names."""
    if isinstance(op, Compute):
        return op.node
    return op.tensor if isinstance(op, Free) else op.storage


@dataclass(frozen=True)
class Schedule:
    """One training step, operation by operation, for the graph with this id."""

    ops: tuple[Op, ...]
    graph_id: str

    def __repr__(self) -> str:
        """One line, since all ops would fill pages."""
        return f"Schedule({counted(len(self.ops), 'op')} of graph {self.graph_id[:19]})"

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the nodes in the order in which they run, recomputations included."""
        return tuple(op.node for op in self.ops if isinstance(op, Compute))

    @cached_property
    def has_copies(self) -> bool:
        """Whether the schedule copies anything to the host or the disk."""
        return not {Compute, Free}.issuperset(map(type, self.ops))

    def ops_to_json(self) -> list[list[str]]:
        """The `ops` of a schedule file: [word, name] for each op."""
        return [[word_for(op), name_in(op)] for op in self.ops]


def ops_from_json(items: Sequence[object], *, source: str) -> tuple[Op, ...]:
    """Read the `ops` of format schedule/2; raises FormatError naming the entry."""
    if len(items) > MAX_ENTRIES:
        raise FormatError(f"{source}: ops has {len(items)} entries; at most {MAX_ENTRIES}")
    return tuple(_op(item, where=f"{source}: ops[{index}]") for index, item in enumerate(items))


def _op(item: object, *, where: str) -> Op:
    """Read one op. Raises FormatError, which says `where` it is."""
    if isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) for part in item):
        word, name = item
        if word in WORDS:
            return WORDS[word](name)
    raise FormatError(
        f'{where} is {item!r:.60}; expected ["compute", node name], ["free", tensor name] or a '
        f"storage's name after one of {', '.join(list(WORDS)[2:])}"
    )


def free_after_last_use(
    graph: Graph, order: Iterable[str], *, held: Mapping[int, Iterable[str]] | None = None
) -> Schedule:
    """Return the schedule that runs the nodes in this order and frees every tensor as early as
    possible.

    A tensor is held until the last op that reads it before its node runs again. An output of the
    graph is held from its last computation to the end. No other choice of frees for the same order
    holds fewer bytes at any position.

    order: names of nodes, recomputations included.
    held: position in the order -> tensors that something outside the graph still holds while that
        op runs, as if the op read them; they must have been computed before.

    Cost: linear in the length of the order.
    """
    order = tuple(order)
    frees_after: list[list[str]] = [[] for _ in order]
    held_to_end = set(graph.outputs)
    read_later: set[str] = set()  # tensors that a later op reads before they are recomputed
    # Backwards: the first time a tensor is seen is its last use.
    for position in range(len(order) - 1, -1, -1):
        node = graph.node_by_name[order[position]]
        others = () if held is None else held.get(position, ())
        for name in dict.fromkeys((*graph.needs[node.name], *node.outputs, *others)):
            if name in graph.producer and name not in read_later and name not in held_to_end:
                frees_after[position].append(name)
            read_later.add(name)
        read_later.difference_update(node.outputs)
        held_to_end.difference_update(node.outputs)
    ops: list[Op] = []
    for name, freed in zip(order, frees_after, strict=True):
        ops.append(Compute(name))
        ops.extend(map(Free, freed))
    return Schedule(ops=tuple(ops), graph_id=graph.graph_id)


def n_before_optimizer(graph: Graph, schedule: Schedule) -> int:
    """The number of ops of a legal schedule before the optimizer's first one (all, if the step has
    no optimizer). Until then the other micro-batches in flight hold what they saved."""
    if graph.n_before_optimizer == len(graph.nodes):
        return len(schedule.ops)
    return schedule.ops.index(Compute(graph.nodes[graph.n_before_optimizer].name))


def other_micro_batch_bytes(graph: Graph, schedule: Schedule, saved_bytes: int) -> list[int]:
    """Bytes that the other micro-batches in flight hold during each op of a legal schedule.

    There are `Graph.n_in_flight` - 1 others. Before the optimizer's first op each holds
    `saved_bytes` or, if that is more, `Graph.others_bytes`; afterwards none holds anything.

    The schedule runs once for each micro-batch, so its backward pass may also be a later one than
    the first. Then one micro-batch less is in flight, but the gradients accumulated so far are on
    the device, which the first backward pass has yet to make. The larger of the two cases counts.

    saved_bytes: what this schedule saves for backward.
    """
    n_others = graph.n_in_flight - 1
    if not n_others:
        return [0] * len(schedule.ops)
    each_bytes = max(saved_bytes, graph.others_bytes)
    n_missing, n_later = len(graph.forward_nodes), 0
    later = (*graph.awaited_bytes, 0)
    ran: set[str] = set()
    awaited_bytes, found = 0, []
    for op in schedule.ops:
        if isinstance(op, Compute):
            is_late = graph.node_by_name[op.node].phase != "forward"
            if n_missing == len(ran):  # the forward pass has ended
                awaited_bytes = later[n_later]
            if is_late:
                awaited_bytes += graph.summed_bytes[n_later]
                n_later += 1
            else:
                ran.add(op.node)
        found.append(n_others * each_bytes + max(0, awaited_bytes - each_bytes))
    before = n_before_optimizer(graph, schedule)
    return [*found[:before], *[0] * (len(found) - before)]
