"""Recomputation planned around given copies: `auto` for the device, on a modified step.

Given are an order of nodes and gaps in it that are spent on the host. The bytes that this leaves
for everything else differ from position to position, and so does what may be read there. A modified
step expresses both. In it, a copied storage comes back by a *fetch*: a node without inputs that
costs next to nothing and may be recomputed, like a parameter's copy (`graphs.host_state`).

- The storage's maker takes its bytes as workspace, and the fetch makes the storage right after it.
- The storage must be on the device until its store has ended, and from where its real fetch begins.
  At both positions a node that reads it marks that. The stores run one after the other in the order
  of making, the fetches as late as their deadlines permit, by the clock of the order.

The best schedule of that step for the device alone says what is recomputed beside the copies, and
where they come back: without the fetches it is an order with gaps again. Copies are placed in it as
in any other, and the simulator decides.

The storages tried first are those that the strongest cut fetches, then the same without the one for
which the compute stream would wait most; then those of the next cut. Proves nothing. On ResNet-50
at 10 % over 50 GB/s it finds 17.9 % instead of 21.8, in seconds: a cut alone knows the bytes of one
position only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from graphs.graph import Graph, Node
from solver.bound import StorageGraph
from solver.methods.auto.copy_placement import Gap, find_gaps, never_copied
from solver.methods.auto.copy_search import CopySearch
from solver.methods.auto.stages import recompute_only
from solver.schedule import OPTIMAL_GAP, Link

N_CUTS, N_CHOICES = 2, 2
"""Cuts, and sets of storages of each, that are tried."""
MORE_GAP = 3e-3
"""After the first set, others are tried only above this gap, a share of the baseline's time."""
FETCH_COST = 0.02
"""Cost of a fetch, as a share of the time of a copy: enough that no storage is sent away
needlessly.
"""
CUT_GAP, CUT_NODES = 3e-4, 20
"""The gap to which a cut is solved, as a share of the baseline's time, and the maximum
branch-and-bound nodes.
"""


@dataclass(frozen=True)
class Visit:
    """A unit's stay on the host between the first runs of two nodes.

    leaves_at: the position right before which it is still on the device.
    returns_at: the position right before which it is on the device again.
    """

    unit: int
    leaves_at: int
    returns_at: int


def recompute_around(search: CopySearch) -> None:
    """Offer the best schedules around what the strongest cuts fetch."""
    folded, tried = search.folded, False
    # A fetch must be recomputable: not of what a later node makes, nor of a storage whose maker
    # also makes a view of it.
    n_made = Counter(
        (folded.position[node.name], folded.unit_of.get(name))
        for node in folded.graph.forward_nodes
        for name in node.outputs
    )
    never = {u for u, maker in enumerate(folded.maker) if n_made[maker, u] != 1}
    never |= never_copied(folded)
    for cut in search.binding.ranked_cuts[:N_CUTS]:
        barred = set(never)
        for _ in range(N_CHOICES):
            if search.is_done or search.gap <= (MORE_GAP if tried else OPTIMAL_GAP):
                return
            tried = True
            order, gaps = _order_and_gaps_of_cut(search, cut.position, barred, near_lp=True)
            if not gaps:  # the LP fetches only fractions of large units
                order, gaps = _order_and_gaps_of_cut(search, cut.position, barred, near_lp=False)
            found = _replan_around(search, order, gaps) if gaps else None
            if found is None:
                break
            search.offer(search.place(*found).schedule)
            waits_s = search.place(order, gaps).waits_s  # with the cut's own recomputation
            if not waits_s:
                break
            barred.add(max(waits_s, key=lambda u: (waits_s[u], u)))


def _order_and_gaps_of_cut(
    search: CopySearch, position: int, barred: Collection[int], *, near_lp: bool
) -> tuple[Sequence[str], list[Gap]]:
    """The order with the cut's recomputation, and the gaps of what the cut fetches.

    barred: units that must not be fetched.
    near_lp: solve near the LP's solution, else the whole MILP.
    """
    program = search.program_at(position, allowance_bytes=0)
    program.forbid_fetches(barred)
    solve = program.solve_near_lp if near_lp else partial(program.solve, as_milp=True)
    node_limit = search.node_limit_for(program, CUT_NODES)
    cut = solve(gap=CUT_GAP, node_limit=node_limit, deadline=search.deadline)
    if cut.kept is None or cut.fetched is None:
        return (), []
    return search.order_and_gaps_of_cut(position, kept=cut.kept, fetched=cut.fetched)


def _replan_around(
    search: CopySearch, order: Sequence[str], gaps: Iterable[Gap]
) -> tuple[Sequence[str], list[Gap]] | None:
    """Another order around the same copies, with its gaps; None: none was found."""
    assert search.copy_places.host is not None
    folded, link = search.folded, search.copy_places.host.link
    visits = find_visits(folded, order, gaps, link)
    if not visits:
        return None
    proposal = recompute_only(
        with_fetches(folded, visits, link),
        budget_bytes=search.budget_bytes,
        time_limit_s=search.deadline.left_s,
        quick=True,
    )
    if proposal.schedule is None:
        return None
    return without_fetches(folded, proposal.schedule.order)


def find_visits(
    folded: StorageGraph, order: Sequence[str], gaps: Iterable[Gap], link: Link
) -> list[Visit]:
    """When each unit is on the host, by the clock of the order, if there is time for its copies.

    Of several gaps of a unit the longest counts.
    """
    longest: dict[int, Gap] = {}
    for gap in sorted(gaps, key=lambda gap: gap.last - gap.first):
        longest[gap.unit] = gap
    # start of each run of the order, and of each node's first run
    run_s = list(accumulate((folded.time_s[folded.position[name]] for name in order), initial=0.0))
    first_run_s = [math.inf] * folded.n_nodes
    for name, start_s in zip(reversed(order), reversed(run_s[:-1]), strict=True):
        first_run_s[folded.position[name]] = start_s
    leaves_at, store_end_s = {}, 0.0
    for u in sorted(longest, key=lambda u: (folded.maker[u], u)):
        made_s = first_run_s[folded.maker[u]] + folded.time_s[folded.maker[u]]
        store_end_s = max(store_end_s, made_s) + link.out_s(folded.unit_bytes[u])
        leaves_at[u] = bisect_left(first_run_s, store_end_s)
    visits, start_s = [], math.inf
    for u in sorted(longest, key=lambda u: (-longest[u].last, u)):
        start_s = min(start_s, run_s[longest[u].last]) - link.in_s(folded.unit_bytes[u])
        returns_at = bisect_right(first_run_s, start_s) - 1
        if leaves_at[u] < returns_at:
            visits.append(Visit(u, leaves_at[u], returns_at))
    return visits


def with_fetches(folded: StorageGraph, visits: Iterable[Visit], link: Link) -> Graph:
    """The modified step of the module, in which these units come back by fetches."""
    graph, names = folded.graph, folded.unit_names
    units_by_maker: dict[int, list[int]] = {}
    marks: dict[int, list[Node]] = {}  # by position, nodes that only read the storage
    for visit in visits:
        units_by_maker.setdefault(folded.maker[visit.unit], []).append(visit.unit)
        name = names[visit.unit]
        for word, p in (("gone", visit.leaves_at), ("back", visit.returns_at)):
            mark = Node(
                name=f"{word}.{name}",
                op="on the device",
                inputs=(name,),
                outputs=(),
                time_s=0.0,
                phase=graph.nodes[p].phase,
                recomputable=False,
            )
            marks.setdefault(p, []).append(mark)
    nodes: list[Node] = []
    for n, node in enumerate(graph.nodes):
        units = units_by_maker.get(n, ())
        kept_outputs = tuple(name for name in node.outputs if name not in {names[u] for u in units})
        if units:
            node = replace(
                node,
                outputs=kept_outputs,
                workspace_bytes=node.workspace_bytes + sum(folded.unit_bytes[u] for u in units),
                recomputable=node.recomputable and bool(kept_outputs),
            )
        nodes += (*marks.get(n, ()), node)
        nodes += (
            Node(
                name=fetch_name_of(names[u]),
                op="fetch",
                inputs=(),
                outputs=(names[u],),
                time_s=FETCH_COST * link.in_s(folded.unit_bytes[u]),
            )
            for u in units
        )
    return replace(graph, nodes=tuple(nodes))


def fetch_name_of(storage: str) -> str:
    """The name of the node that brings the storage back. No traced name has a dot in that place."""
    return f"fetch.{storage}"


def without_fetches(folded: StorageGraph, order: Sequence[str]) -> tuple[Sequence[str], list[Gap]]:
    """The order on the graph itself, and the gaps that end where a fetched unit is read again."""
    fetches: Mapping[str, int] = {
        fetch_name_of(name): u for u, name in enumerate(folded.unit_names)
    }
    nodes: list[str] = []
    stored, awaiting_read, gap_ends = set[int](), set[int](), set[tuple[int, int]]()
    for name in order:
        if name in fetches:
            u = fetches[name]
            (awaiting_read if u in stored else stored).add(u)
        elif name in folded.position:
            read_now = awaiting_read.intersection(folded.reads[folded.position[name]])
            gap_ends |= {(u, len(nodes)) for u in read_now}
            awaiting_read -= read_now
            nodes.append(name)
    return tuple(nodes), [
        gap for gap in find_gaps(folded, nodes) if (gap.unit, gap.last) in gap_ends
    ]
