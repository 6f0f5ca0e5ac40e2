"""A graph's blocks as a chain of numbers, for methods that only know chains.

This is a model. It overestimates where blocks share tensors, where gradients accumulate, and where
a block's last ops need not be recomputed. What a schedule really takes is decided by `simulate`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from graphs.graph import Graph
from solver.chain.blocks import Blocks, Storage, forward_storages
from solver.chain.problem import Chain

LEAST_ROOM = 0.02
"""Where nearly all of the budget is taken, a block is not made smaller than for this share."""


def to_chain(graph: Graph, blocks: Blocks) -> Chain:
    """Seconds and bytes of each block, in the conventions of `Chain`.

    Resident tensors, companions and outputs of the graph are left out; see `constant_bytes`.
    Gradients of parameters, and anything else that stays on the device from one backward segment to
    the next, count as workspace of the segments during which they are live.
    """
    model = _Model(graph, blocks)
    n_blocks = blocks.n_blocks
    return Chain(
        forward_s=tuple(map(model.seconds, blocks.forward)),
        backward_s=tuple(map(model.seconds, blocks.backward)),
        input_bytes=tuple(map(model.bytes_of, model.crossing)),
        saved_bytes=tuple(map(model.bytes_of, model.saved)),
        forward_workspace_bytes=tuple(
            model.forward_workspace_bytes(block) for block in range(1, n_blocks + 1)
        ),
        backward_workspace_bytes=tuple(
            model.backward_workspace_bytes(block) for block in range(1, n_blocks + 2)
        ),
    )


def constant_bytes(graph: Graph, blocks: Blocks) -> int:
    """Bytes on the device besides the chain: resident tensors, companions, forward-made outputs."""
    return graph.resident_bytes + sum(
        s.size_bytes for s in forward_storages(graph) if s.is_output or s.name in blocks.companions
    )


def room_bytes(graph: Graph, blocks: Blocks, *, budget_bytes: int) -> dict[str, int]:
    """By forward node: bytes of the budget left for the forward pass's tensors, at the worst point
    of its block's backward segment, and at least LEAST_ROOM of the largest.

    It shrinks during the backward pass as gradients of parameters accumulate.
    """
    later_bytes = _later_live_bytes(graph)
    left = budget_bytes - constant_bytes(graph, blocks)
    rooms = [
        left - max((later_bytes[name] for name in segment), default=0)
        for segment in blocks.backward[: blocks.n_blocks]
    ]
    least = max(1, math.ceil(LEAST_ROOM * max(rooms, default=1)))
    return {
        name: max(least, room)
        for names, room in zip(blocks.forward, rooms, strict=True)
        for name in names
    }


class _Model:
    """Computes the numbers of `to_chain`."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self._graph = graph
        self._blocks = blocks
        self._storages = {
            s.name: s
            for s in forward_storages(graph)
            if not s.is_output and s.name not in blocks.companions
        }
        self._starts = [0, *accumulate(len(names) for names in blocks.forward)]
        self._made_by_block: list[list[Storage]] = [[] for _ in range(blocks.n_blocks + 1)]
        for storage in self._storages.values():
            self._made_by_block[bisect_right(self._starts, storage.born)].append(storage)
        self.crossing = [
            frozenset(name for name in names if name in self._storages) for names in blocks.crossing
        ]
        self.saved = [
            crossing.union(s.name for s in made if s.read_later)
            for crossing, made in zip(self.crossing, self._made_by_block, strict=True)
        ]
        self._later_bytes = _later_live_bytes(graph)

    def seconds(self, nodes: Iterable[str]) -> float:
        return math.fsum(self._graph.node_by_name[name].time_s for name in nodes)

    def bytes_of(self, storages: Iterable[str]) -> int:
        return sum(self._storages[name].size_bytes for name in storages)

    def forward_workspace_bytes(self, block: int) -> int:
        """Workspace of the block's forward, in bytes.

        This is its peak beyond its input and output, or beyond its input and everything that it
        saves; the larger of the two.
        """
        input_bytes = self.bytes_of(self.crossing[block - 1])
        return max(
            0,
            *(
                self._forward_peak_bytes(block, kept=kept) - input_bytes - self.bytes_of(kept)
                for kept in (self.crossing[block], self.saved[block])
            ),
        )

    def _forward_peak_bytes(self, block: int, *, kept: frozenset[str]) -> int:
        made_bytes: defaultdict[int, int] = defaultdict(int)
        freed_bytes: defaultdict[int, int] = defaultdict(int)
        for storage in self._made_by_block[block]:
            made_bytes[storage.born] += storage.size_bytes
            if storage.name not in kept:
                freed_bytes[storage.last_read] += storage.size_bytes
        live = self.bytes_of(self.crossing[block - 1])
        peak = live
        for position, name in enumerate(self._blocks.forward[block - 1], self._starts[block - 1]):
            live += made_bytes[position]
            peak = max(peak, live + self._graph.node_by_name[name].workspace_bytes)
            live -= freed_bytes[position]
        return peak

    def backward_workspace_bytes(self, block: int) -> int:
        """Workspace of the backward segment, in bytes.

        This is its peak beyond the block's input, everything that it saves, and the gradients of
        input and output. For the caller's loss (block L + 1), which has no forward pass, it is the
        peak beyond its input and the gradient of that.
        """
        segment = self._blocks.backward[block - 1]
        is_loss = block > self._blocks.n_blocks
        readable = self.crossing[block - 1] | (frozenset() if is_loss else self.saved[block])
        unread = set(readable)  # going backwards: not read by any node further on, so freed there
        live = peak = 0
        for name in reversed(segment):
            for storage in map(self._graph.root, self._graph.node_by_name[name].inputs):
                if storage in unread:
                    unread.discard(storage)
                    live += self._storages[storage].size_bytes
            peak = max(peak, live + self._later_bytes[name])
        other_bytes = 2 * self.bytes_of(self.crossing[block - 1])
        if not is_loss:
            other_bytes += self.bytes_of(self.saved[block]) + self.bytes_of(self.crossing[block])
        return max(0, peak - other_bytes)


def _later_live_bytes(graph: Graph) -> dict[str, int]:
    """By later node: live bytes that later nodes made, and its workspace, while it runs.

    Later nodes run exactly once, so this does not depend on what is recomputed.
    """
    last_read: dict[str, str] = {}
    for node in graph.later_nodes:
        last_read.update((graph.root(name), node.name) for name in (*node.inputs, *node.outputs))
    kept = {graph.root(name) for name in graph.outputs}
    freed_bytes: defaultdict[str, int] = defaultdict(int)
    live = 0
    bytes_during: dict[str, int] = {}
    for node in graph.later_nodes:
        for name in node.outputs:
            tensor = graph.tensor_by_name[name]
            if tensor.alias_of is None:
                live += tensor.size_bytes
                if name not in kept:
                    freed_bytes[last_read[name]] += tensor.size_bytes
        bytes_during[node.name] = live + node.workspace_bytes
        live -= freed_bytes[node.name]
    return bytes_during
