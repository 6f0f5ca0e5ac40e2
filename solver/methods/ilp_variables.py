"""The variables of the integer program: which tensors and recomputations each stage decides on.

`solver.methods.ilp` explains the program. Here the step is divided into stages, each ending with
the first run of a node, and everything that cannot matter in a stage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from solver.bound import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline

MAX_VARIABLES = 20_000
"""With more variables the search takes hours, and the method refuses."""


class MissingSolverError(ImportError):
    """PuLP is not installed."""


class TooLargeError(ValueError):
    """The graph's integer program is too large to solve; the message says how large."""


@dataclass(frozen=True)
class Item:
    """A tensor of the forward pass that may be dropped.

    size_bytes: 0 for an alias.
    root: the item that owns its storage (itself if it is no alias).
    maker: the node that makes it.
    uses: nodes whose first runs read it, and n_nodes if it is an output of the graph.
    """

    name: str
    size_bytes: int
    root: int
    maker: int
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """The stage that ends with the first run of node p (n_nodes: the end of the step).

    needed: items that may be on the device when it begins, ascending.
    recompute: nodes that may be recomputed in it, ascending.
    constant_bytes: bytes on the device throughout, not counting items.
    """

    p: int
    needed: tuple[int, ...]
    recompute: tuple[int, ...]
    constant_bytes: int


class Stages:
    """All stages, with what each may hold and recompute.

    reads, made: by node, the items that it reads and makes.
    pinned: (stage, item) for items that must be on the device when the stage begins, whatever the
        schedule.
    """

    def __init__(
        self,
        folded: StorageGraph,
        *,
        budget_bytes: int,
        n_sweeps: int,
        deadline: Deadline = NEVER,
    ) -> None:
        """Raises TooLargeError, and OutOfTimeError."""
        self.folded = folded
        self.budget_bytes = budget_bytes
        self.n_sweeps = n_sweeps
        self.items = _items(folded)
        self._index = index = {item.name: i for i, item in enumerate(self.items)}
        nodes = folded.graph.nodes
        self.reads = [
            tuple(dict.fromkeys(index[x] for x in folded.graph.needs[node.name] if x in index))
            for node in nodes
        ]
        self.made = [tuple(index[x] for x in node.outputs if x in index) for node in nodes]
        # The first stage at which keeping everything could exceed the budget. What would be
        # recomputed before it could as well have been kept.
        first, all_bytes = 0, folded.graph.resident_bytes
        while first < folded.n_forward:
            if all_bytes + int(folded.own_bytes[first]) > budget_bytes:
                break
            all_bytes += sum(folded.unit_bytes[u] for u in folded.makes[first])
            first += 1
        self.stages: list[Stage] = []
        for p in range(first, folded.n_nodes + 1):
            deadline.check()
            self.stages.append(self._make_stage(p, may_recompute=p > first))
        self.pinned = frozenset(self._find_pinned())
        if self.n_variables > MAX_VARIABLES:
            raise TooLargeError(
                f"the integer program of {len(nodes)} nodes would have {self.n_variables} "
                f"variables, more than {MAX_VARIABLES}; use a smaller graph or --method auto"
            )

    @property
    def n_variables(self) -> int:
        return self.n_sweeps * sum(
            len(stage.needed) + sum(2 + len(self.reads[n]) for n in stage.recompute)
            for stage in self.stages
        )

    def _make_stage(self, p: int, *, may_recompute: bool) -> Stage:
        """The stage with what can be of use at p: read later, or by what may be recomputed."""
        folded, items = self.folded, self.items
        n_run = min(p, folded.n_forward)
        may_ever_recompute = folded.may_recompute(
            after=p - 1, before=folded.n_nodes + 1, budget_bytes=self.budget_bytes
        )
        needed = {
            i for i, item in enumerate(items) if item.maker < n_run and item.uses[-1:] >= (p,)
        }
        for u, name in enumerate(folded.unit_names):  # an alias that a later node made may hold it
            if folded.maker[u] < n_run and folded.is_pinned(u, p) and name in self._index:
                needed.add(self._index[name])
        needed |= {items[i].root for i in needed}
        recompute = []
        for n in range(n_run - 1, -1, -1):
            if may_ever_recompute[n] and not needed.isdisjoint(self.made[n]):
                recompute.append(n)
                needed.update(self.reads[n], (items[i].root for i in self.reads[n]))
        constant_bytes = folded.graph.resident_bytes + sum(
            folded.unit_bytes[u]
            for u in range(folded.n_units)
            if folded.maker[u] >= folded.n_forward and folded.must_be_on_device(u, p)
        )
        recomputable_now = sorted(
            n for n in recompute if may_recompute and not folded.cannot_recompute(n, p)
        )
        return Stage(p, tuple(sorted(needed)), tuple(recomputable_now), constant_bytes)

    def _find_pinned(self) -> Iterator[tuple[int, int]]:
        for i, item in enumerate(self.items):
            if not self.folded.recomputable[item.maker] and item.uses:
                yield from ((p, i) for p in range(item.maker + 1, item.uses[-1] + 1))
        for name, spans in zip(self.folded.unit_names, self.folded.pinned, strict=True):
            if name in self._index:
                root = self._index[name]
                yield from ((p, root) for first, last in spans for p in range(first, last + 1))


def _items(folded: StorageGraph) -> tuple[Item, ...]:
    """Tensors made by forward nodes, if their storage has bytes or aliases; others never go."""
    graph = folded.graph
    names = [
        name
        for node in graph.forward_nodes
        for name in node.outputs
        if (root := graph.root(name)) in graph.producer
        and (graph.tensor_by_name[root].size_bytes > 0 or root in graph.views)
    ]
    index = {name: i for i, name in enumerate(names)}
    position = folded.position
    uses: list[list[int]] = [[] for _ in names]
    for p, node in enumerate(graph.nodes):
        for name in dict.fromkeys(graph.needs[node.name]):
            if name in index:
                uses[index[name]].append(p)
    return tuple(
        Item(
            name=name,
            size_bytes=graph.tensor_by_name[name].size_bytes if graph.root(name) == name else 0,
            root=index[graph.root(name)],
            maker=position[graph.producer[name].name],
            uses=(*uses[i], *([folded.n_nodes] if name in graph.outputs else ())),
        )
        for i, name in enumerate(names)
    )
