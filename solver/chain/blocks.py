"""Cut a graph into a chain of blocks where it is narrow.

Checkpointing by segments, revolve and the dynamic programs think of a chain: block after block,
each handing a few bytes to the next. A traced model is a DAG of operators. Here its forward nodes
are partitioned into contiguous blocks at the moments when few bytes cross, and its later nodes into
the backward segments of these blocks. Only structure decides: who reads what, how large, in what
order.

*Width.* The width of a moment between two forward nodes is the bytes of the storages that a node
before it made and a forward node after it reads. Resident tensors, tensors that only later phases
read, and outputs of the graph (held to its end anyway) do not count. While a node runs, its outputs
stand beside what crosses: a hump.

*Where to cut.* At a moment that is a bottleneck: on either side, memory rises to nearly twice its
width before a narrower moment comes. In a plain chain of layers that is every moment; in a
transformer the ends of the residual branches; next to a pooling layer its narrow side. (A plain
local minimum will not do: along a network whose tensors shrink, only the last moment is one.)

*Companions.* Attention masks, position tables, an encoder's output, a long skip: what crosses many
cuts belongs to no block. Companions are not counted in widths, and methods keep them throughout.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphs.graph import Graph

BOTTLENECK = 1.75
"""Memory must rise to this multiple of a moment's width on both sides. Between equal tensors it
rises to 2; between a residual stream with one branch and the next narrower moment to 1.5."""

MUCH_WIDER = 1.5

COMPANION_CUTS = 4
"""What crosses so many cuts accompanies the chain. A skip over one block crosses two."""

COMPANION_NODES = (8, 128)
"""The first guess, before cuts are known: what spans a quarter of the forward pass, within these
limits."""


@dataclass(frozen=True)
class Blocks:
    """A chain of L blocks. All names are of nodes or of storages (the tensor that owns it).

    forward: the forward nodes of blocks 1 .. L, contiguous in graph order.
    backward: the later nodes that belong to blocks 1 .. L, and as last entry the nodes of the loss
        that the caller computes (phase outside). Contiguous in graph order from the last to the
        first.
    after: the nodes after the backward pass (phase optimizer).
    crossing: L + 1 entries; the storages x_0 .. x_L handed on at each cut, companions included.
        x_0 is empty (the batch is resident); x_L is what the caller's loss reads.
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

    @functools.cached_property
    def at_cuts(self) -> frozenset[str]:
        """The storages that cross any cut."""
        return frozenset(name for names in self.crossing for name in names) | self.companions


@dataclass(frozen=True)
class Storage:
    """Bytes that a forward node makes: from which forward node to which reader (by position).

    last_read: position of the last forward node that reads a tensor on it (`born` if none does).
    read_later: whether a later node reads it. held: an output of the graph is on it, so it stays.
    size_bytes: 0 for a view of something resident.
    """

    name: str
    size_bytes: int
    born: int
    last_read: int
    read_later: bool
    held: bool


def split_into_blocks(graph: Graph, *, max_blocks: int | None = None) -> Blocks:
    """Partition the graph into a chain of at most `max_blocks` blocks (default: all there are).

    Cost: O(n log n) in the size of the graph. A graph without a narrow moment is one block.
    """
    if max_blocks is not None and max_blocks < 1:
        raise ValueError(f"max_blocks is {max_blocks}; it must be at least 1")
    storages = forward_storages(graph)
    n_nodes = len(graph.forward_nodes)
    shortest, longest = COMPANION_NODES
    span = max(shortest, min(longest, n_nodes // 4))
    guessed = frozenset(s.name for s in storages if s.last_read - s.born >= span)
    companions = _crossing_many(storages, _bottlenecks(storages, guessed, n_nodes))
    positions = _bottlenecks(storages, companions, n_nodes)
    if max_blocks is not None and len(positions) >= max_blocks:
        positions = _coarsened(graph, storages, companions, positions, max_blocks)
    return _blocks(graph, storages, companions, positions)


def forward_storages(graph: Graph) -> tuple[Storage, ...]:
    """The storages that forward nodes make, in order of birth."""
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
    held = {graph.root(name) for name in graph.outputs}
    return tuple(
        Storage(
            name=name,
            size_bytes=graph.tensor_by_name[name].size_bytes if name in graph.producer else 0,
            born=position,
            last_read=max(position, last_read.get(name, position)),
            read_later=name in read_later,
            held=name in held,
        )
        for name, position in born.items()
    )


def _crossings(storages: Sequence[Storage], positions: Iterable[int]) -> Iterator[tuple[str, ...]]:
    """The storages that cross the moment before each of these forward nodes (positions ascend)."""
    born = deque(storages)  # in this order they are
    read = deque(sorted(storages, key=lambda storage: storage.last_read))
    alive: dict[str, None] = {}
    for position in positions:
        while born and born[0].born < position:
            alive[born.popleft().name] = None
        while read and read[0].last_read < position:
            del alive[read.popleft().name]
        yield tuple(alive)


def _crossing_many(storages: Sequence[Storage], positions: Sequence[int]) -> frozenset[str]:
    n_before = [0]  # cuts at or before each position
    cuts = set(positions)
    for position in range(1, max((s.last_read for s in storages), default=0) + 1):
        n_before.append(n_before[-1] + (position in cuts))
    return frozenset(
        s.name for s in storages if n_before[s.last_read] - n_before[s.born] >= COMPANION_CUTS
    )


def _widths(
    storages: Iterable[Storage], ignored: frozenset[str], n_nodes: int
) -> tuple[list[int], list[int]]:
    """The width of each moment (before node p; 0 is unused) and the hump of each node."""
    change = [0] * (n_nodes + 1)
    made = [0] * n_nodes
    for storage in storages:
        if storage.name not in ignored and not storage.held:
            made[storage.born] += storage.size_bytes
            change[storage.born + 1] += storage.size_bytes
            if storage.last_read < n_nodes:
                change[storage.last_read + 1] -= storage.size_bytes
    widths = [0] * n_nodes
    for position in range(1, n_nodes):
        widths[position] = widths[position - 1] + change[position]
    return widths, [widths[position] + made[position] for position in range(n_nodes)]


def _bottlenecks(storages: Sequence[Storage], ignored: frozenset[str], n_nodes: int) -> list[int]:
    widths, humps = _widths(storages, ignored, n_nodes)
    moments = range(1, n_nodes)
    from_left = _rises(moments, widths, [humps[p - 1] for p in moments])
    from_right = _rises(moments[::-1], widths, [humps[p] for p in moments[::-1]])
    found = [p for p in moments if min(from_left[p], from_right[p]) >= BOTTLENECK * widths[p]]
    return _without_wide_ones(found, widths)


def _without_wide_ones(positions: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Leave out a bottleneck much wider than both its neighbours: it helps nobody."""
    inner = range(1, len(positions) - 1)
    wide = {
        positions[i]
        for i in inner
        if widths[positions[i]]
        >= MUCH_WIDER * max(widths[positions[i - 1]], widths[positions[i + 1]])
        and widths[positions[i]] > 0
    }
    return [position for position in positions if position not in wide]


def _rises(moments: Iterable[int], widths: Sequence[int], humps: Iterable[int]) -> dict[int, float]:
    """The highest hump between each moment and the nearest narrower one before it in `moments`.

    humps: the one just before each moment. Infinite where no narrower moment comes before.
    """
    rises: dict[int, float] = {}
    stack: list[tuple[int, float]] = []  # moments of rising width, each with its highest hump
    for moment, hump in zip(moments, humps, strict=True):
        highest: float = hump
        while stack and stack[-1][0] >= widths[moment]:
            highest = max(highest, stack.pop()[1])
        rises[moment] = highest if stack else float("inf")
        stack.append((widths[moment], highest))
    return rises


def _coarsened(
    graph: Graph,
    storages: Sequence[Storage],
    companions: frozenset[str],
    positions: Sequence[int],
    max_blocks: int,
) -> list[int]:
    """Fewer cuts, evenly spaced by what the blocks would save; the narrowest of each stretch.

    Bytes that later nodes read measure a block's share; a graph that saves nothing is divided by
    its number of nodes.
    """
    n_nodes = len(graph.forward_nodes)
    widths, _ = _widths(storages, companions, n_nodes)
    made = [0] * n_nodes
    for storage in storages:
        if storage.read_later and not storage.held:
            made[storage.born] += storage.size_bytes
    weights = made if any(made) else [1] * n_nodes
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    chosen: dict[int, tuple[int, float, int]] = {}
    for position in positions:
        share = before[position] * max_blocks / before[-1]
        stretch = round(share)
        if 1 <= stretch < max_blocks:
            candidate = (widths[position], abs(share - stretch), position)
            chosen[stretch] = min(candidate, chosen.get(stretch, candidate))
    return sorted(position for _, _, position in chosen.values())


def _blocks(
    graph: Graph,
    storages: Sequence[Storage],
    companions: frozenset[str],
    positions: Sequence[int],
) -> Blocks:
    names = [node.name for node in graph.forward_nodes]
    bounds = [0, *positions, len(names)] if names else [0]
    forward = tuple(tuple(names[start:stop]) for start, stop in pairwise(bounds))
    outside_reads = {
        graph.root(name) for n in graph.later_nodes if n.phase == "outside" for name in n.inputs
    }
    return Blocks(
        forward=forward,
        backward=_backward(graph, storages, companions, positions, n_blocks=len(forward)),
        after=tuple(node.name for node in graph.later_nodes if node.phase == "optimizer"),
        crossing=(
            *_crossings(storages, bounds[:-1]),
            tuple(s.name for s in storages if s.name in outside_reads),
        ),
        companions=companions,
    )


def _backward(
    graph: Graph,
    storages: Sequence[Storage],
    companions: frozenset[str],
    positions: Sequence[int],
    *,
    n_blocks: int,
) -> tuple[tuple[str, ...], ...]:
    """Give each backward node to a block, from the last to the first.

    A node belongs where the forward pass last used the tensors that it reads (a parameter counts
    where one block uses it). Some nodes read out of turn: a weight's gradient that was put off, a
    skip. The longest descent decides; the nodes that are not of it, and those that read nothing of
    the forward pass, stay in the segment before them.
    """
    block_of = _block_by_position(positions, n_nodes=len(graph.forward_nodes))
    home = _block_of_resident(graph, block_of)
    home.update((s.name, block_of[s.last_read]) for s in storages if s.name not in companions)
    nodes = [node for node in graph.later_nodes if node.phase == "backward"]
    homes = [[home[root] for root in map(graph.root, n.inputs) if root in home] for n in nodes]
    telling = [index for index, blocks in enumerate(homes) if blocks]
    descent = _longest_descent([min(homes[index]) for index in telling])
    block_from = {telling[place]: min(homes[telling[place]]) for place in descent}
    segments: list[list[str]] = [[] for _ in range(n_blocks + 1)]
    segments[n_blocks] = [node.name for node in graph.later_nodes if node.phase == "outside"]
    current = n_blocks - 1
    for index, node in enumerate(nodes):
        current = block_from.get(index, current)
        segments[max(current, 0)].append(node.name)
    return tuple(map(tuple, segments))


def _block_by_position(positions: Sequence[int], *, n_nodes: int) -> list[int]:
    cuts = set(positions)
    block = 0
    blocks = []
    for position in range(n_nodes):
        block += position in cuts
        blocks.append(block)
    return blocks


def _block_of_resident(graph: Graph, block_of: Sequence[int]) -> dict[str, int]:
    """The block of each resident storage that only one block reads."""
    readers: dict[str, set[int]] = {}
    for position, node in enumerate(graph.forward_nodes):
        for root in map(graph.root, node.inputs):
            if root not in graph.producer:
                readers.setdefault(root, set()).add(block_of[position])
    return {root: blocks.pop() for root, blocks in readers.items() if len(blocks) == 1}


def _longest_descent(values: Sequence[int]) -> list[int]:
    """The places of a longest subsequence that never rises (patience sorting, O(n log n))."""
    lowest: list[int] = []  # by length - 1: the last value, negated, of the best descent so far
    last: list[int] = []  # and its place
    before: list[int] = []
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
    """What is on the device at the cuts, and all that the last `n_whole` blocks make.

    The words of `rematerialise.keep`: storages kept from the forward pass.
    """
    kept = set(blocks.at_cuts)
    for block in blocks.forward[max(0, blocks.n_blocks - n_whole) :]:
        for node in block:
            kept.update(graph.root(name) for name in graph.node_by_name[node].outputs)
    return frozenset(kept)
