"""Turn a chain's operations into a schedule of the graph.

In the chain problem an operation runs a block; in the graph a block is many nodes that share
tensors with their neighbours. The code here tracks which tensors each operation leaves on the
device. A missing tensor is recomputed right before it is read, and what nothing reads is not
recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from graphs.graph import Graph
from solver.chain.binomial import Action
from solver.chain.blocks import Blocks
from solver.chain.problem import (
    Backward,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
)
from solver.schedule import (
    Schedule,
    free_after_last_use,
    is_recomputable,
    lost_views,
    missing_computes,
    without_dead_computes,
)
from solver.sizes_deadlines_progress import NEVER, Deadline


def chain_to_schedule(
    graph: Graph,
    blocks: Blocks,
    ops: Iterable[ChainOp],
    *,
    keep_inputs: bool = False,
    deadline: Deadline = NEVER,
) -> Schedule:
    """The schedule of the whole step for these operations.

    ops: legal in the chain problem.
    keep_inputs: never drop a block's input, even if the operations do.

    Raises OutOfTimeError when the deadline has passed.
    """
    step = _Step(graph, blocks)
    for op in ops:
        deadline.check()
        match op:
            case ForwardKeepingOutput(block):
                step.forward(block, drop_input=not keep_inputs)
            case ForwardKeepingInput(block):
                step.forward(block, drop_input=False)
            case ForwardKeepingAll(block):
                step.forward_keeping_all(block)
            case Backward(block):
                step.run_later(blocks.backward[block - 1])
                step.saved_blocks.discard(block)
                step.release_cut(block)
    deadline.check()
    step.run_later(blocks.after)
    step.order += missing_computes(graph, lost_views(graph, step.order), step.available)
    return free_after_last_use(graph, without_dead_computes(graph, step.order))


def reversal_ops(n_blocks: int, actions: Iterable[Action]) -> Iterator[ChainOp]:
    """A reversal of equal steps as chain operations; step i is block i + 1.

    Snapshots of all levels count as kept on the device.
    """
    n_levels_holding = Counter[int]()  # by step, on how many levels
    for kind, start, stop in actions:
        if kind == "store":
            n_levels_holding[start] += 1
        elif kind == "drop":
            n_levels_holding[start] -= 1
        elif kind == "advance":
            for step in range(start, stop):
                keeping = ForwardKeepingInput if n_levels_holding[step] else ForwardKeepingOutput
                yield keeping(step + 1)
        elif kind == "reverse":
            yield ForwardKeepingAll(start)
            if start == n_blocks:  # the caller's loss, between forward and backward pass
                yield Backward(start + 1)
            yield Backward(start)


class _Step:
    """Collects the nodes in the order in which the operations need them; blocks count from 1.

    order: the nodes so far.
    available: the tensors that may be read. A tensor is removed when no held cut and no saved block
        needs it any more, and is recomputed if a node reads it later.
    """

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self.order: list[str] = []
        self.available = {tensor.name for tensor in graph.resident}
        self.saved_blocks: set[int] = set()
        self._graph = graph
        self._blocks = blocks
        self._ran_blocks: set[int] = set()
        # without companions: they are pinned below, computed once and never dropped
        self._crossing = blocks.crossing_without_companions
        self._held_cuts: set[int] = set()
        self._n_cuts_holding: Counter[str] = Counter()  # storage -> how many held cuts it crosses
        self._hold_cut(0)
        self._block_of = {
            name: index
            for index, names in enumerate(blocks.forward, start=1)
            for node in names
            for name in graph.node_by_name[node].outputs
        }
        self._tensors_on: defaultdict[str, list[str]] = defaultdict(list)  # by storage
        for name in self._block_of:
            self._tensors_on[graph.root(name)].append(name)
        self._pinned = {
            name
            for node in graph.forward_nodes
            for name in node.outputs
            if graph.root(name) in blocks.companions or not is_recomputable(graph, node)
        }

    def forward(self, block: int, *, drop_input: bool) -> None:
        """Run the block. Afterwards its output is available, and its input unless dropped."""
        if block in self._ran_blocks:
            nodes = tuple(
                missing_computes(self._graph, self._tensors_crossing(block), self.available)
            )
            self.order += nodes
        else:
            nodes = self._run_first(block)
        self._hold_cut(block)
        self._make_unavailable(
            name for node in nodes for name in self._graph.node_by_name[node].outputs
        )
        if drop_input:
            self.release_cut(block - 1)
            self._make_unavailable(self._tensors_crossing(block - 1))

    def forward_keeping_all(self, block: int) -> None:
        """Run the block, and drop nothing of it until its backward has run.

        If the block has run before, nothing is recomputed here: later operations recompute what
        they miss.
        """
        self.saved_blocks.add(block)
        self._hold_cut(block)
        if block not in self._ran_blocks:
            self._run_first(block)

    def run_later(self, nodes: Iterable[str]) -> None:
        """Run these later nodes, and recompute before each of them the tensors that it lacks."""
        for name in nodes:
            node = self._graph.node_by_name[name]
            self.order += missing_computes(
                self._graph, self._graph.needs[node.name], self.available
            )
            self.order.append(name)
            self.available.update(node.outputs)

    def release_cut(self, cut: int) -> None:
        """Stop holding the storages that cross this cut."""
        if cut in self._held_cuts:
            self._held_cuts.remove(cut)
            self._n_cuts_holding.subtract(self._crossing[cut])

    def _run_first(self, block: int) -> tuple[str, ...]:
        nodes = self._blocks.forward[block - 1]
        self._ran_blocks.add(block)
        self.order += nodes
        for node in nodes:
            self.available.update(self._graph.node_by_name[node].outputs)
        return nodes

    def _tensors_crossing(self, cut: int) -> list[str]:
        """Tensors of blocks up to the cut, on the storages that cross it, without companions."""
        return [
            name
            for storage in self._crossing[cut]
            for name in self._tensors_on[storage]
            if self._block_of[name] <= cut
        ]

    def _hold_cut(self, cut: int) -> None:
        if cut not in self._held_cuts:
            self._held_cuts.add(cut)
            self._n_cuts_holding.update(self._crossing[cut])

    def _make_unavailable(self, names: Iterable[str]) -> None:
        """Make these tensors unavailable, except those that a held cut or a saved block needs."""
        self.available.difference_update(
            name
            for name in names
            if name not in self._pinned
            and not self._n_cuts_holding[self._graph.root(name)]
            and self._block_of[name] not in self.saved_blocks
        )
