"""Divide a graph into levels for `solver.chain.nested_reversal_bound`, and compute their numbers.

Any division of the forward pass and any checks give a valid bound. Good ones have a check where the
backward pass of a level holds most, and few bytes at the ends of levels. So the blocks of the graph
are joined into levels such that each level has one backward segment with less room than its
neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import median_high

from solver.bound import Milp, StorageGraph
from solver.chain.blocks import Blocks
from solver.sizes_deadlines_progress import NEVER, Deadline

MAX_SLOTS = 40
"""If the room is so many times w or more, no bound is computed: cuts prove more there."""
TINY = 1 / 16
"""Units crossing the end of a level that are smaller than this share of the largest are ignored."""
MAX_NEEDED_SETS = 64
"""Maximum sets of units that may be needed of one level; a division with more is given up."""
MAX_COLUMNS = 100_000
"""Maximum columns of the LPs of all levels together: a few seconds."""

Units = frozenset[int]


@dataclass(frozen=True)
class Levels:
    """The numbers of the module `solver.chain.nested_reversal_bound`; levels count from 1.

    width_bytes: w.
    forward_s: f, by level.
    one_unit_s: d.
    room_bytes: M, by check, 1 .. n.
    stretches: the nodes of each level.
    arrival: f' and d' (None: not known, so no level counts as due).
    programs: solves the LPs of the levels; shared by several divisions.
    """

    width_bytes: int
    forward_s: tuple[float, ...]
    one_unit_s: float
    room_bytes: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    arrival: Arrival | None = None
    programs: Programs = field(default_factory=lambda: Programs())

    @property
    def n_levels(self) -> int:
        return len(self.forward_s)

    def saving_s(self, level: int, held_bytes: int, *, unaided: bool = False) -> float:
        """s: the least time of the level's nodes to make its demand from so many bytes of units.

        unaided: s' instead: no node may read more of the previous level than later nodes do.
        """
        return self.programs.saving_s(self.stretches[level - 1], held_bytes, unaided=unaided)


@dataclass(frozen=True)
class Arrival:
    """What is needed of a level in the window of the next one.

    forward_s, one_unit_s: f' by level, and d'.
    always_due: by level, whether the previous level is due in its window in any case.
    due_if_read: by level, whether the previous level is due when the level's nodes read it.
    """

    forward_s: tuple[float, ...]
    one_unit_s: float
    always_due: tuple[bool, ...]
    due_if_read: tuple[bool, ...]


@dataclass
class Programs:
    """Solves the LPs of levels, each once.

    After MAX_COLUMNS columns in total they prove nothing, so the work does not depend on the clock.
    """

    n_columns: int = 0
    known_s: dict[tuple[object, int, bool], float] = field(default_factory=dict)

    def saving_s(self, stretch: Stretch, held_bytes: int, *, unaided: bool) -> float:
        held_bytes = min(max(0, held_bytes), sum(stretch.unit_bytes.values()))
        key = stretch.signature, held_bytes, unaided
        if key not in self.known_s:
            self.n_columns += len(stretch.nodes) + len(stretch.unit_bytes)
            may_solve = self.n_columns <= MAX_COLUMNS
            self.known_s[key] = stretch.saving_s(held_bytes, unaided=unaided) if may_solve else 0.0
        return self.known_s[key]


@dataclass(frozen=True)
class Stretch:
    """The nodes of a level, in order, and the units that count.

    nodes: (time_s, units made, units of the level read, units of the previous level read).
    unit_bytes: sizes of the level's units that are not free.
    demand: D.
    later: units of the previous level that later nodes in the level's window read.
    """

    nodes: tuple[tuple[float, Units, Units, Units], ...]
    unit_bytes: Mapping[int, int]
    demand: Units
    later: Units = frozenset()

    @cached_property
    def signature(self) -> object:
        """Equal for levels that are the same except for the numbers of their units."""
        number = {u: i for i, u in enumerate(sorted(self.unit_bytes))}
        nodes = tuple(
            (
                time_s,
                tuple(sorted(number[u] for u in made)),
                tuple(sorted(number[u] for u in read)),
                before <= self.later,
            )
            for time_s, made, read, before in self.nodes
        )
        sizes = tuple(self.unit_bytes[u] for u in sorted(self.unit_bytes))
        return nodes, sizes, tuple(sorted(number[u] for u in self.demand))

    def time_and_reads_for(self, wanted: Units, held: int | None) -> tuple[float, Units]:
        """Time of the nodes that make the wanted units if unit `held` is on the device.

        Also returns the units of the previous level that these nodes read.
        """
        missing = set(wanted) - {held}
        time_s, read_of_previous = 0.0, set[int]()
        for node_s, made, read, read_before in reversed(self.nodes):
            if not missing.isdisjoint(made):
                time_s += node_s
                missing |= read - {held}
                read_of_previous |= read_before
        return time_s, frozenset(read_of_previous)

    @property
    def read_before(self) -> Units:
        """Units of the previous level that the level's nodes read and later nodes there do not."""
        return frozenset[int]().union(*(before for *_, before in self.nodes)) - self.later

    def saving_s(self, held_bytes: int, *, unaided: bool = False) -> float:
        """The LP of a knapsack: units to hold within held_bytes, and nodes to run for the rest.

        unaided: none of the nodes that read `read_before` may run; inf if that is impossible.
        """
        program = Milp()
        keep = {
            u: program.variable(most=float(size <= held_bytes))
            for u, size in self.unit_bytes.items()
        }
        scale = max(self.unit_bytes.values(), default=0) or 1
        run: dict[int, int] = {}
        for node_s, made, _, before in self.nodes:
            most = float(not unaided or before <= self.later)
            run.update(dict.fromkeys(made, program.variable(cost=node_s, most=most)))
        for u in self.demand:
            program.row([keep[u], run[u]], [1.0, 1.0], lower=1.0)
        for _, made, read, _ in self.nodes:
            for u in read if made else ():
                reader = run[next(iter(made))]
                program.row([keep[u], run[u], reader], [1.0, 1.0, -1.0], lower=0.0)
        sizes = [size / scale for size in self.unit_bytes.values()]
        program.row(list(keep.values()), sizes, upper=held_bytes / scale)
        return max(0.0, program.solve(as_milp=False).bound)


def divisions_into_levels(
    folded: StorageGraph, blocks: Blocks, budget_bytes: int, *, deadline: Deadline = NEVER
) -> Iterator[Levels]:
    """Divisions of the graph into levels that may give a bound. Raises OutOfTimeError."""
    programs = Programs()
    starts = [0, *accumulate(len(names) for names in blocks.forward)]
    tight_segments = list(_tight_segments(folded, blocks, budget_bytes))
    if len(tight_segments) < 2:
        return
    checks = [p for _, p in tight_segments]
    begin = [starts[block - 1] for block, _ in tight_segments]
    end = [starts[block] for block, _ in tight_segments]
    room_bytes = budget_bytes - min(int(folded.least_bytes[p]) for p in checks)
    for bounds in ((*begin, starts[-1]), (0, *end)):
        deadline.check()
        width_bytes = _usual_width(folded, bounds)
        if room_bytes >= MAX_SLOTS * width_bytes:
            continue
        # What a level makes is read in the segment of its own check, or of the next one.
        for later in (0, 1):
            found = divide(
                folded,
                bounds=bounds[: len(bounds) - later],
                checks=checks[later:],
                width_bytes=width_bytes,
                budget_bytes=budget_bytes,
                deadline=deadline,
            )
            if found is not None:
                yield replace(found, programs=programs)


def _tight_segments(
    folded: StorageGraph, blocks: Blocks, budget_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield (block, position) for backward segments with no more room than their neighbours.

    The position is that of the segment's node at which any schedule needs most.
    """
    room: list[tuple[int, int, int]] = []
    for block, names in enumerate(blocks.backward[: blocks.n_blocks], start=1):
        if names:
            positions = [folded.position[name] for name in names]
            p = max(positions, key=lambda p: int(folded.least_bytes[p]))
            room.append((budget_bytes - int(folded.least_bytes[p]), block, p))
    for i, (room_bytes, block, p) in enumerate(room):
        if all(room_bytes <= each[0] for each in room[max(0, i - 1) : i + 2]):
            yield block, p


def _usual_width(folded: StorageGraph, bounds: Sequence[int]) -> int:
    """The median of the bytes that cross the ends of levels, without relatively tiny units."""
    widths = []
    crossing: set[int] = set()
    p = 0
    for bound in bounds[1:-1]:
        for n in range(p, bound):
            crossing.update(folded.makes[n])
        p = bound
        crossing = {
            u
            for u in crossing
            if any(bound <= use < folded.n_forward for use in folded.uses[u])
            and not folded.pinned[u]
        }
        sizes = [folded.unit_bytes[u] for u in crossing]
        least = TINY * max(sizes, default=0)
        widths.append(sum(size for size in sizes if size >= least))
    return median_high(widths) if widths else 0


def divide(
    folded: StorageGraph,
    *,
    bounds: Sequence[int],
    checks: Sequence[int],
    width_bytes: int,
    budget_bytes: int,
    deadline: Deadline = NEVER,
) -> Levels | None:
    """The levels between these bounds, n + 1 ascending forward positions; None: they prove nothing.

    checks: by level, positions of later nodes, descending.

    Raises ValueError if bounds or checks are not in order, and OutOfTimeError.
    """
    n = len(bounds) - 1
    if n < 1 or len(checks) != n or width_bytes < 1:
        return None
    later = [folded.n_forward - 1, *reversed(checks)]
    if sorted(set(later)) != later or sorted(set(bounds)) != list(bounds):
        raise ValueError("bounds must ascend, and checks descend among the later nodes")
    level = [_level_of(folded, u, bounds, width_bytes) for u in range(folded.n_units)]
    stretches = tuple(_make_stretch(folded, k, bounds, checks, level) for k in range(1, n + 1))
    deadline.check()
    times = _level_times(stretches, width_bytes, deadline=deadline)
    if times is None:
        return None
    rooms = tuple(_room(folded, k, checks[k - 1], level, budget_bytes) for k in range(1, n + 1))
    arrival = _arrival(stretches, width_bytes, deadline=deadline)
    return Levels(width_bytes, times[0], times[1], rooms, stretches, arrival)


def _level_of(folded: StorageGraph, u: int, bounds: Sequence[int], width_bytes: int) -> int:
    """The level that makes the unit; 0 if the unit is free."""
    level = bisect_right(bounds, folded.maker[u])
    if level == len(bounds) or folded.pinned[u] or 2 * folded.unit_bytes[u] < width_bytes:
        return 0
    reads = [use for use in folded.uses[u] if use < folded.n_forward]
    return 0 if reads and bisect_right(bounds, reads[-1]) > level + 1 else level


def _make_stretch(
    folded: StorageGraph,
    k: int,
    bounds: Sequence[int],
    checks: Sequence[int],
    level: Sequence[int],
) -> Stretch:
    def on_level(units: Sequence[int], wanted: int) -> Units:
        return frozenset(u for u in units if wanted and level[u] == wanted)

    after = checks[k] if k < len(checks) else folded.n_forward - 1
    nodes = range(bounds[k - 1], bounds[k])
    read = {u for p in range(after + 1, checks[k - 1] + 1) for u in folded.reads[p]}
    return Stretch(
        nodes=tuple(
            (
                folded.time_s[v],
                on_level(folded.makes[v], k),
                on_level(folded.reads[v], k),
                on_level(folded.reads[v], k - 1),
            )
            for v in nodes
        ),
        unit_bytes={u: folded.unit_bytes[u] for v in nodes for u in on_level(folded.makes[v], k)},
        demand=on_level(sorted(read), k),
        later=on_level(sorted(read), k - 1),
    )


def _arrival(
    stretches: Sequence[Stretch], width_bytes: int, *, deadline: Deadline
) -> Arrival | None:
    """f' and d'; None if they prove nothing.

    The previous level is due if what is read of it is neither nothing nor one unit of less than w.
    """

    def fits_empty_range(units: Units, below: Stretch) -> bool:
        return not units or (len(units) == 1 and below.unit_bytes[min(units)] < width_bytes)

    always_due, due_if_read = [False], [False]
    wanted: list[set[Units]] = []
    for below, stretch in pairwise(stretches):
        reads = [stretch.later | {u} for u in sorted(stretch.read_before)]
        always_due.append(not fits_empty_range(stretch.later, below))
        due_if_read.append(not any(fits_empty_range(each, below) for each in reads))
        wanted.append({stretch.later} if always_due[-1] else set(reads if due_if_read[-1] else ()))
    times = _level_times(stretches, width_bytes, [*wanted, set()], deadline=deadline)
    if times is None:
        return None
    return Arrival(times[0], times[1], tuple(always_due), tuple(due_if_read))


def _level_times(
    stretches: Sequence[Stretch],
    width_bytes: int,
    extra_demands: Sequence[set[Units]] = (),
    *,
    deadline: Deadline,
) -> tuple[tuple[float, ...], float] | None:
    """f by level, and d; None if nothing is demanded of a level, or one unit saves a whole level.

    Going down from the last level, collect all sets of units that may be needed of a level: what is
    demanded of it, and what the level above reads, with no unit of the levels above held or with
    one. extra_demands: by level, sets that are demanded besides.
    """
    none_held: set[Units] = set()
    one_held: set[Units] = set()
    times: list[float] = []
    saved_s = 0.0
    for k in range(len(stretches), 0, -1):
        deadline.check()
        stretch = stretches[k - 1]
        none_held.add(stretch.demand)
        none_held |= extra_demands[k - 1] if extra_demands else set()
        if not stretch.demand or len(none_held) + len(one_held) > MAX_NEEDED_SETS:
            return None
        none_below, one_below = set[Units](), set[Units]()
        level_s, with_one_s = list[float](), list[float]()
        for wanted in none_held | one_held:
            time_s, before = stretch.time_and_reads_for(wanted, None)
            level_s.append(time_s)
            (none_below if wanted in none_held else one_below).add(before)
        for wanted in none_held:
            for u, size_bytes in stretch.unit_bytes.items():
                if size_bytes < width_bytes:
                    time_s, before = stretch.time_and_reads_for(wanted, u)
                    with_one_s.append(time_s)
                    one_below.add(before)
        if k > 1 and frozenset() in none_below | one_below:
            return None
        times.append(min(level_s))
        saved_s = max(saved_s, min(level_s) - min(with_one_s, default=min(level_s)))
        none_held, one_held = none_below, one_below
    return tuple(reversed(times)), saved_s


def _room(folded: StorageGraph, k: int, p: int, level: Sequence[int], budget_bytes: int) -> int:
    """M: bytes left at check k, position p, for units of lower levels."""
    taken_bytes = int(folded.held_bytes[p]) + int(folded.own_bytes[p])
    reads = (u for u in folded.reads[p] if not folded.is_pinned(u, p))
    taken_bytes += sum(folded.unit_bytes[u] for u in reads if not 1 <= level[u] < k)
    return budget_bytes - taken_bytes
