"""Cut a graph into a chain of blocks where it is narrow.

Checkpointing by segments, revolve and the dynamic programs work on a chain: block after block, each
handing a few bytes to the next. A traced model is a DAG of operators. Here its forward nodes are
partitioned into contiguous blocks at positions where few bytes cross, and its later nodes into the
backward segments of these blocks. Only the graph's structure decides: which node reads which
tensor, the sizes of tensors, and the order of nodes.

*Width.* The width at a position, between two forward nodes, is the bytes of the storages that a
node before it made and a forward node after it reads. Resident tensors, tensors that only later
phases read, and outputs of the graph (kept to its end in any case) do not count. While a node runs,
its outputs are live beside what crosses. The sum is called a hump.

*Where to cut.* At a bottleneck: on either side, memory rises to nearly twice its width before a
narrower position comes. In a plain chain of layers that is every position; in a transformer the
ends of the residual branches; next to a pooling layer its narrow side. (Local minima of the width
are not enough: in a network whose tensors shrink, only the last position is one.)

*Companions.* Storages that cross many cuts, such as attention masks, position tables, an encoder's
output or a long skip, belong to no block. They are not counted in widths, and methods keep them
throughout.

NetworkX's dominators are as fast (0.3 s for 27,521 nodes, the sweeps here 0.2 s) but no substitute:
they find single nodes through which everything passes, and a single mask leaves none; and they
ignore bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from graphs.graph import Graph

BOTTLENECK = 1.75
"""Memory must rise to this multiple of a position's width on both sides. Between equal tensors it
rises to 2; between a residual stream with one branch and the next narrower position to 1.5."""

MUCH_WIDER = 1.5
"""A bottleneck so many times wider than both its neighbours is no cut, since it saves nothing."""

COMPANION_CUTS = 4
"""A storage that crosses so many cuts is a companion. A skip over one block crosses two."""

COMPANION_NODES = (8, 128)
"""Before cuts are known, storages alive for a quarter of the forward nodes, clamped to these
limits, are taken for companions.
"""


@dataclass(frozen=True)
class Blocks:
    """A chain of L blocks. Names are those of nodes, or of storages (by the tensor that owns one).

    forward: the forward nodes of blocks 1 .. L, contiguous in graph order.
    backward: the backward nodes that belong to blocks 1 .. L and, as last entry, the nodes of the
        loss that the caller computes (phase outside). Contiguous in graph order from the last entry
        to the first.
    after: the nodes after the backward pass (phase optimizer).
    crossing: L + 1 entries; the storages x_0 .. x_L handed on at each cut, companions included. x_0
        is empty (the batch is resident); x_L is what the caller's loss reads.
    companions: storages that cross many cuts.
    """

    forward: tuple[tuple[str, ...], ...]
    backward: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    crossing: tuple[tuple[str, ...], ...]
    companions: frozenset[str]

    @property
    def n_blocks(self) -> int:
        return len(self.forward)

    @cached_property
    def crossing_without_companions(self) -> tuple[tuple[str, ...], ...]:
        """The storages that cross each cut, without companions."""
        return tuple(
            tuple(name for name in names if name not in self.companions) for names in self.crossing
        )


@dataclass(frozen=True)
class Storage:
    """A storage that a forward node makes; positions are those of forward nodes.

    size_bytes: 0 for a view of something resident.
    born: position of the node that makes it.
    last_read: position of the last forward node that reads a tensor on it (`born` if none does).
    read_later: whether a later node reads it.
    is_output: whether an output of the graph is on it, so that it stays to the end.
    """

    name: str
    size_bytes: int
    born: int
    last_read: int
    read_later: bool
    is_output: bool


def split_into_blocks(
    graph: Graph,
    *,
    max_blocks: int | None = None,
    room_bytes: Mapping[str, int] | None = None,
) -> Blocks:
    """Partition the graph into a chain of at most `max_blocks` blocks (default: no limit).

    Blocks save equal shares of what all save, or, with room_bytes, equal shares of the room: bytes
    by forward node, 1 or more, that are left for saved tensors while their backward segment runs.

    Cost: O(n log n) in the size of the graph. A graph without a bottleneck is one block.
    Raises ValueError if max_blocks is less than 1.
    """
    if max_blocks is not None and max_blocks < 1:
        raise ValueError(f"max_blocks is {max_blocks}; it must be at least 1")
    storages = forward_storages(graph)
    names = [node.name for node in graph.forward_nodes]
    shortest, longest = COMPANION_NODES
    span = max(shortest, min(longest, len(names) // 4))
    guessed = frozenset(s.name for s in storages if s.last_read - s.born >= span)
    # Cuts depend on companions and companions on cuts: cut with guessed companions, then again.
    cuts = _bottlenecks(*_widths(storages, guessed, len(names)))
    companions = frozenset(
        s.name
        for s in storages
        if bisect_right(cuts, s.last_read) - bisect_right(cuts, s.born) >= COMPANION_CUTS
    )
    widths, humps = _widths(storages, companions, len(names))
    cuts = _bottlenecks(widths, humps)
    if max_blocks is not None and len(cuts) >= max_blocks:
        rooms = [1] * len(names) if room_bytes is None else [room_bytes[name] for name in names]
        cuts = _fewer_cuts(storages, cuts, widths, rooms, max_blocks)
    bounds = [0, *cuts, len(names)] if names else [0]
    read_outside = {
        graph.root(name) for n in graph.later_nodes if n.phase == "outside" for name in n.inputs
    }
    return Blocks(
        forward=tuple(tuple(names[start:stop]) for start, stop in pairwise(bounds)),
        backward=_backward_segments(graph, storages, companions, cuts),
        after=tuple(node.name for node in graph.later_nodes if node.phase == "optimizer"),
        crossing=(
            *_crossings(storages, bounds[:-1]),
            tuple(s.name for s in storages if s.name in read_outside),
        ),
        companions=companions,
    )


def computing_blocks(graph: Graph) -> Blocks:
    """As `split_into_blocks`, for reports: only blocks that compute something.

    A block that only updates buffers (batch norm counts its calls and keeps running averages) makes
    nothing that the step reads. Methods may cut there, but a table of blocks should have no row for
    it. Each is merged into the block before it, or into the next one if there is none before.
    """
    blocks = split_into_blocks(graph)
    needed = {graph.root(name) for node in graph.later_nodes for name in node.inputs}
    needed |= {graph.root(name) for name in graph.outputs}
    bookkeeping = set()  # forward nodes whose outputs are only read by nodes that make nothing
    for node in reversed(graph.forward_nodes):
        if needed.isdisjoint(map(graph.root, node.outputs)):
            bookkeeping.add(node.name)
        else:
            needed.update(map(graph.root, node.inputs))
    computes = [not bookkeeping.issuperset(names) for names in blocks.forward]
    # Number the blocks by how many computing blocks there are up to them: equal numbers merge.
    numbers = [max(1, number) for number in accumulate(computes)]
    starts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1])]
    spans = list(pairwise([*starts, len(numbers)])) if numbers else []
    return Blocks(
        forward=tuple(sum(blocks.forward[start:stop], ()) for start, stop in spans),
        backward=(
            *(sum(reversed(blocks.backward[start:stop]), ()) for start, stop in spans),
            blocks.backward[-1],
        ),
        after=blocks.after,
        crossing=(*(blocks.crossing[start] for start, _ in spans), blocks.crossing[-1]),
        companions=blocks.companions,
    )


def forward_storages(graph: Graph) -> tuple[Storage, ...]:
    """The storages that forward nodes make, in the order in which they are made."""
    born: dict[str, int] = {}
    last_read: dict[str, int] = {}
    owner: dict[str, str] = {}
    for position, node in enumerate(graph.forward_nodes):
        for name in node.inputs:
            if name in owner:
                last_read[owner[name]] = position
        for name in node.outputs:
            owner[name] = graph.root(name)
            born.setdefault(owner[name], position)
    read_later = {
        owner[name] for node in graph.later_nodes for name in node.inputs if name in owner
    }
    output_storages = {graph.root(name) for name in graph.outputs}
    return tuple(
        Storage(
            name=name,
            size_bytes=graph.tensor_by_name[name].size_bytes if name in graph.producer else 0,
            born=position,
            last_read=max(position, last_read.get(name, position)),
            read_later=name in read_later,
            is_output=name in output_storages,
        )
        for name, position in born.items()
    )


def _crossings(storages: Sequence[Storage], positions: Iterable[int]) -> Iterator[tuple[str, ...]]:
    """The storages that cross each of these ascending positions."""
    born = deque(storages)  # already in the order in which they are made
    read = deque(sorted(storages, key=lambda storage: storage.last_read))
    alive: dict[str, None] = {}
    for position in positions:
        while born and born[0].born < position:
            alive[born.popleft().name] = None
        while read and read[0].last_read < position:
            del alive[read.popleft().name]
        yield tuple(alive)


def _widths(
    storages: Iterable[Storage], ignored: frozenset[str], n_nodes: int
) -> tuple[list[int], list[int]]:
    """The width before each forward node (entry 0 is unused), and the hump of each node."""
    change = [0] * (n_nodes + 1)
    made = [0] * n_nodes
    for storage in storages:
        if storage.name not in ignored and not storage.is_output:
            made[storage.born] += storage.size_bytes
            change[storage.born + 1] += storage.size_bytes
            if storage.last_read < n_nodes:
                change[storage.last_read + 1] -= storage.size_bytes
    widths = list(accumulate(change))[:n_nodes]
    return widths, [width + bytes_made for width, bytes_made in zip(widths, made, strict=True)]


def _bottlenecks(widths: Sequence[int], humps: Sequence[int]) -> list[int]:
    """The positions to cut: bottlenecks that are not much wider than both their neighbours."""
    positions = range(1, len(widths))
    from_left = _highest_hump_to_narrower(positions, widths, [humps[p - 1] for p in positions])
    from_right = _highest_hump_to_narrower(
        positions[::-1], widths, [humps[p] for p in positions[::-1]]
    )
    found = [p for p in positions if min(from_left[p], from_right[p]) >= BOTTLENECK * widths[p]]
    inner = zip(found, found[1:], found[2:], strict=False)
    wide = {p for a, p, b in inner if widths[p] >= max(1, MUCH_WIDER * max(widths[a], widths[b]))}
    return [p for p in found if p not in wide]


def _highest_hump_to_narrower(
    positions: Iterable[int], widths: Sequence[int], humps: Iterable[int]
) -> dict[int, float]:
    """The highest hump between each position and the nearest narrower one before it in `positions`.

    humps: the one just before each position. Infinite where no narrower position comes before.
    """
    highest_before: dict[int, float] = {}
    stack: list[tuple[int, float]] = []  # (ascending widths, the highest hump since the last)
    for position, hump in zip(positions, humps, strict=True):
        highest_hump: float = hump
        while stack and stack[-1][0] >= widths[position]:
            highest_hump = max(highest_hump, stack.pop()[1])
        highest_before[position] = highest_hump if stack else float("inf")
        stack.append((widths[position], highest_hump))
    return highest_before


def _fewer_cuts(
    storages: Sequence[Storage],
    cuts: Sequence[int],
    widths: Sequence[int],
    rooms: Sequence[int],
    max_blocks: int,
) -> list[int]:
    """Fewer cuts: the narrowest near each multiple of an equal share of what the blocks would save.

    What a block would save is its bytes that later nodes read, each divided by the room (`rooms`,
    by position). If nothing is saved, shares are equal in the number of nodes.
    """
    saved = [0.0] * len(widths)
    for storage in storages:
        if storage.read_later and not storage.is_output:
            saved[storage.born] += storage.size_bytes / rooms[storage.born]
    saved_before = list(accumulate(saved if any(saved) else [1.0] * len(widths), initial=0.0))
    chosen: dict[int, tuple[int, float, int]] = {}
    for position in cuts:
        share = saved_before[position] * max_blocks / saved_before[-1]
        nearest = round(share)
        if 1 <= nearest < max_blocks:
            candidate = (widths[position], abs(share - nearest), position)
            chosen[nearest] = min(candidate, chosen.get(nearest, candidate))
    return sorted(position for _, _, position in chosen.values())


def _backward_segments(
    graph: Graph, storages: Sequence[Storage], companions: frozenset[str], cuts: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Assign each backward node to a block, going from the last block to the first.

    A node belongs to the earliest block whose tensors it reads; a tensor belongs to the block that
    last used it in the forward pass (a parameter: the only block that uses it). Some nodes read out
    of order, such as a weight's gradient computed late, or a skip. So the longest non-increasing
    sequence of blocks decides. The other nodes, and nodes that read nothing of the forward pass,
    join the segment of the node before them.
    """
    readers: dict[str, set[int]] = {}  # resident storage -> blocks that read it
    for position, node in enumerate(graph.forward_nodes):
        for root in map(graph.root, node.inputs):
            if root not in graph.producer:
                readers.setdefault(root, set()).add(bisect_right(cuts, position))
    block_of_storage = {root: blocks.pop() for root, blocks in readers.items() if len(blocks) == 1}
    block_of_storage.update(
        (s.name, bisect_right(cuts, s.last_read)) for s in storages if s.name not in companions
    )
    nodes = [node for node in graph.later_nodes if node.phase == "backward"]
    earliest = {}  # index in nodes -> the earliest block from which it reads
    for index, node in enumerate(nodes):
        if blocks_read := [
            block_of_storage[root]
            for root in map(graph.root, node.inputs)
            if root in block_of_storage
        ]:
            earliest[index] = min(blocks_read)
    nodes_with_block = list(earliest)  # nodes that read something of a block
    block_from = {
        nodes_with_block[place]: earliest[nodes_with_block[place]]
        for place in _longest_descent([earliest[index] for index in nodes_with_block])
    }
    n_blocks = len(cuts) + 1 if graph.forward_nodes else 0
    segments: list[list[str]] = [[] for _ in range(n_blocks + 1)]
    segments[n_blocks] = [node.name for node in graph.later_nodes if node.phase == "outside"]
    current = n_blocks - 1
    for index, node in enumerate(nodes):
        current = block_from.get(index, current)
        segments[max(current, 0)].append(node.name)
    return tuple(map(tuple, segments))


def _longest_descent(values: Sequence[int]) -> list[int]:
    """Indices of a longest non-increasing subsequence (patience sorting, O(n log n))."""
    lowest: list[int] = []  # by length - 1: the last value, negated, of the best descent so far
    last: list[int] = []  # and its index
    before: list[int] = []  # for each index, the previous one in its best descent (-1: none)
    for place, value in enumerate(values):
        length = bisect_right(lowest, -value)
        before.append(last[length - 1] if length else -1)
        lowest[length : length + 1] = [-value]
        last[length : length + 1] = [place]
    places: list[int] = []
    place = last[-1] if last else -1
    while place >= 0:
        places.append(place)
        place = before[place]
    return places[::-1]


def checkpoints(graph: Graph, blocks: Blocks, *, n_whole: int) -> frozenset[str]:
    """The storages to `keep` for checkpoints at all cuts.

    These are the storages that cross cuts, companions, and everything that the last `n_whole`
    blocks make.
    """
    kept = set(blocks.companions).union(*blocks.crossing)
    for block in blocks.forward[max(0, blocks.n_blocks - n_whole) :]:
        for node in block:
            kept.update(map(graph.root, graph.node_by_name[node].outputs))
    return frozenset(kept)
