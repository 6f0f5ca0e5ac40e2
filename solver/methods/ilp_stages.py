"""The index sets of the integer program: which tensors and recomputations each stage decides on.

`solver.methods.ilp` explains the program. Here the step is cut into stages, each ending with the
first run of a node, and everything that cannot matter in a stage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from solver.bound import FoldedGraph
from solver.common import NEVER, Deadline

MAX_VARIABLES = 20_000
"""Beyond this many variables the search takes hours, and the method refuses."""


class MissingSolverError(ImportError):
    """PuLP is not installed."""


class TooLargeError(ValueError):
    """The graph makes a program that is too large to solve; the message says how large."""


@dataclass(frozen=True)
class Item:
    """A tensor of the forward pass that may be dropped. root: the item with its bytes (itself, if
    it is no alias). uses: first runs that read it, n_nodes for the end.
    """

    name: str
    size_bytes: int
    root: int
    maker: int
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Stage p: what may be there when it begins, and what may be recomputed in it, ascending."""

    p: int
    needed: tuple[int, ...]
    recompute: tuple[int, ...]
    constant_bytes: int


@dataclass(frozen=True)
class Stages:
    """The program's index sets. reads: by forward node, the items that it reads."""

    folded: FoldedGraph
    budget_bytes: int
    n_sweeps: int
    items: tuple[Item, ...]
    reads: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    pinned: frozenset[tuple[int, int]]

    @classmethod
    def of(
        cls, folded: FoldedGraph, *, budget_bytes: int, n_sweeps: int, deadline: Deadline = NEVER
    ) -> Stages:
        """Raises TooLargeError, and OutOfTimeError."""
        items = _items(folded)
        index = {item.name: i for i, item in enumerate(items)}
        nodes = folded.graph.nodes
        reads = tuple(
            tuple(dict.fromkeys(index[x] for x in node.inputs if x in index)) for node in nodes
        )
        made = tuple(tuple(index[x] for x in node.outputs if x in index) for node in nodes)
        first = _first_stage(folded, budget_bytes)
        stages = []
        for p in range(first, folded.n_nodes + 1):
            deadline.check()
            stages.append(
                _stage(
                    folded, items, reads, made, p=p, allowed=p > first, budget_bytes=budget_bytes
                )
            )
        pinned = frozenset(_pinned(folded, items, index))
        found = cls(folded, budget_bytes, n_sweeps, items, reads, made, tuple(stages), pinned)
        if found.n_variables > MAX_VARIABLES:
            raise TooLargeError(
                f"the integer program of {len(nodes)} nodes would have {found.n_variables} "
                f"variables, more than {MAX_VARIABLES}; use a smaller graph or --method auto"
            )
        return found

    @property
    def n_variables(self) -> int:
        return self.n_sweeps * sum(
            len(stage.needed)
            + len(stage.recompute) * 2
            + sum(len(self.reads[n]) for n in stage.recompute)
            for stage in self.stages
        )


def _items(folded: FoldedGraph) -> tuple[Item, ...]:
    """Tensors made by forward nodes whose storage has bytes; the others are there for nothing."""
    graph = folded.graph
    names = [
        name
        for node in graph.forward_nodes
        for name in node.outputs
        if graph.root(name) in graph.producer
        and graph.tensor_by_name[graph.root(name)].size_bytes > 0
    ]
    index = {name: i for i, name in enumerate(names)}
    position = {node.name: p for p, node in enumerate(graph.nodes)}
    outputs = set(graph.outputs)
    return tuple(
        Item(
            name=name,
            size_bytes=graph.tensor_by_name[name].size_bytes if graph.root(name) == name else 0,
            root=index[graph.root(name)],
            maker=position[graph.producer[name].name],
            uses=tuple(position[node.name] for node in graph.consumers[name])
            + ((folded.n_nodes,) if name in outputs else ()),
        )
        for name in names
    )


def _first_stage(folded: FoldedGraph, budget_bytes: int) -> int:
    """The first stage at which keeping everything could overflow: nothing is recomputed up to it.

    What would be recomputed before it could as well have been kept.
    """
    all_bytes = folded.graph.resident_bytes
    for p in range(folded.n_forward):
        if all_bytes + int(folded.own_bytes[p]) > budget_bytes:
            return p
        all_bytes += sum(folded.unit_bytes[u] for u in folded.makes[p])
    return folded.n_forward


def _stage(
    folded: FoldedGraph,
    items: tuple[Item, ...],
    reads: tuple[tuple[int, ...], ...],
    made: tuple[tuple[int, ...], ...],
    *,
    p: int,
    allowed: bool,
    budget_bytes: int,
) -> Stage:
    """What can still serve at stage p: read later, or read by what may be recomputed for that."""
    before = min(p, folded.n_forward)
    may = (
        folded.may_recompute(after=p - 1, before=folded.n_nodes + 1, budget_bytes=budget_bytes)
        if p
        else folded.recomputable
    )
    needed = {i for i, item in enumerate(items) if item.maker < before and item.uses[-1:] >= (p,)}
    needed |= {i for u in range(folded.n_units) for i in _held_by_alias(folded, items, u, p)}
    needed |= {items[i].root for i in needed}
    recompute = []
    for n in range(before - 1, -1, -1):
        if may[n] and not needed.isdisjoint(made[n]):
            recompute.append(n)
            needed.update(reads[n])
            needed.update(items[i].root for i in reads[n])
    here = (
        sum(
            folded.unit_bytes[u]
            for u in range(folded.n_units)
            if folded.maker[u] >= folded.n_forward and folded.must_be_there(u, p)
        )
        + folded.graph.resident_bytes
    )
    return Stage(p, tuple(sorted(needed)), tuple(sorted(recompute)) if allowed else (), here)


def _held_by_alias(folded: FoldedGraph, items: tuple[Item, ...], u: int, p: int) -> Iterator[int]:
    """The root item of a forward unit that a later node's alias holds at p."""
    if folded.maker[u] < min(p, folded.n_forward) and folded.is_pinned(u, p):
        yield from (i for i, item in enumerate(items) if item.name == folded.unit_names[u])


def _pinned(
    folded: FoldedGraph, items: tuple[Item, ...], index: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """(stage, item): what must be there when the stage begins, whatever is decided."""
    for i, item in enumerate(items):
        if not folded.recomputable[item.maker] and item.uses:
            yield from ((p, i) for p in range(item.maker + 1, item.uses[-1] + 1))
    for u, spans in enumerate(folded.pinned):
        root = index.get(folded.unit_names[u])
        if root is not None:
            yield from ((p, root) for first, last in spans for p in range(first, last + 1))
