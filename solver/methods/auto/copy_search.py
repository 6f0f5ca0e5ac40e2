"""The search with copies, for one graph and one budget: what it has found so far, and its tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from graphs.graph import Graph
from solver.bound import CopyBinding, CopyMilp, StorageGraph
from solver.methods.auto.copy_placement import (
    Gap,
    Placed,
    find_gaps,
    longest_to_disk,
    place_within_layout,
)
from solver.methods.auto.from_cuts import schedule_from_cuts
from solver.methods.auto.search import DONE_GAP
from solver.methods.auto.stages import recompute_only
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import Places, Schedule, Simulation, simulate_if_legal
from solver.sizes_deadlines_progress import interrupted

COLUMNS = 4_000
"""Programs with more columns get fewer branch-and-bound nodes than asked for."""


class CopySearch(BestSoFar):
    """The best schedule and the best bound so far.

    folded: the step on the device alone.
    offloadable: the step in which storages may leave the device.
    starts: known schedules of this graph.
    quick: skip the slow stages if the others have found a schedule.
    cut_short: the time limit has ended one part of the search, and another part has followed.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        time_limit_s: float,
        places: Places,
        starts: Sequence[Schedule],
        quick: bool,
    ) -> None:
        super().__init__(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, places=places)
        self.copy_places: Places = places
        self.starts, self.quick = starts, quick
        self.folded = StorageGraph.of(graph)
        self.offloadable = StorageGraph.of(graph, may_offload=True)
        self.binding = CopyBinding(0.0, ())
        self.cut_short = False
        self.climb_starts: list[Schedule] = []  # where the local search starts, besides the best
        self.climb_end: Schedule | None = None  # where the local search has ended

    def offer(self, schedule: Schedule) -> Simulation | None:
        """Simulate the schedule and keep it if it is the best; None: it is illegal."""
        simulation = simulate_if_legal(self.graph, schedule, places=self.copy_places)
        if simulation is not None:
            self.keep_if_best(schedule, simulation)
        return simulation

    def offer_proposal(self, proposal: Proposal) -> None:
        """Offer the schedule of another search, such as one with fewer places."""
        self.timed_out = self.timed_out or proposal.timed_out
        if proposal.schedule is not None:
            self.offer(proposal.schedule)

    @contextlib.contextmanager
    def with_time_share(self, share: float) -> Iterator[None]:
        """Within this context the search has only this share of the remaining time."""
        full_deadline = self.deadline
        self.deadline = full_deadline.earlier((1 - share) * full_deadline.left_s)
        yield
        self.deadline = full_deadline
        self.cut_short = self.timed_out
        self.timed_out = full_deadline.passed or interrupted()

    @property
    def is_done(self) -> bool:
        return self.time_is_up() or self.gap <= DONE_GAP

    def recompute_only(self, budget_bytes: int, *, quick: bool) -> Proposal:
        """Search for a schedule without copies, within budget_bytes."""
        return recompute_only(
            self.graph,
            budget_bytes=budget_bytes,
            time_limit_s=self.deadline.left_s,
            starts=[schedule for schedule in self.starts if not schedule.has_copies],
            quick=quick,
        )

    def program_at(self, position: int, *, allowance_bytes: int | None = None) -> CopyMilp:
        """The program of the cut at this position.

        allowance_bytes: if given, recomputation counts only where it is needed (`just_in_time`),
            and the program proves nothing.
        """
        return CopyMilp(
            self.offloadable,
            position=position,
            budget_bytes=self.budget_bytes,
            places=self.copy_places,
            just_in_time=allowance_bytes is not None,
            allowance_bytes=allowance_bytes or 0,
        )

    def node_limit_for(self, program: CopyMilp, n_nodes: int) -> int:
        """Branch-and-bound nodes for this program: n_nodes, or fewer if it is large."""
        return max(1, min(n_nodes, n_nodes * COLUMNS // len(program.program.cost)))

    def order_and_gaps_of_cut(
        self, position: int, *, kept: frozenset[int], fetched: frozenset[int]
    ) -> tuple[Sequence[str], list[Gap]]:
        """The order of nodes with the cut's recomputation, and the gaps around p that are copied.

        position: p.
        kept, fetched: the units that the cut keeps on the device, and those that it fetches later.
        """
        schedule = schedule_from_cuts(
            self.folded, {position: kept | fetched}, deadline=self.deadline
        )
        order = schedule.order
        if position == len(self.graph.nodes):  # the end: no node follows that could read a fetch
            return order, []
        at = order.index(self.graph.nodes[position].name)
        gaps = [
            gap
            for gap in find_gaps(self.folded, order)
            if gap.unit in fetched and gap.first < at < gap.last
        ]
        return order, gaps

    def place(self, order: Sequence[str], gaps: Iterable[Gap]) -> Placed:
        """Place copies for these gaps in the order; what is away longest goes on to the disk."""
        gaps = tuple(gaps)
        return place_within_layout(
            self.folded,
            order,
            gaps,
            budget_bytes=self.budget_bytes,
            places=self.copy_places,
            to_disk=lambda places: longest_to_disk(self.folded, gaps, places),
        )
