"""A chain's operations as a schedule of the graph.

In the chain problem an operation runs a block; in the graph a block is many nodes that share
tensors with their neighbours. Here it is known which tensors each operation leaves; what is missing
is recomputed right before it is read, and what nothing reads is not recomputed.
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
    """The schedule of the whole step that these operations of a legal chain solution ask for.

    keep_inputs: drop no block's input, whatever the operations say.

    Raises OutOfTimeError.
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
                step.release(block)
    deadline.check()
    step.run_later(blocks.after)
    step.order += missing_computes(graph, lost_views(graph, step.order), step.available)
    return free_after_last_use(graph, without_dead_computes(graph, step.order))


def reversal_ops(n_blocks: int, actions: Iterable[Action]) -> Iterator[ChainOp]:
    """A reversal of equal steps, step i being block i + 1; a snapshot on any level is held."""
    held = Counter[int]()  # by step, on how many levels
    for kind, start, stop in actions:
        if kind == "store":
            held[start] += 1
        elif kind == "drop":
            held[start] -= 1
        elif kind == "advance":
            for step in range(start, stop):
                keeping = ForwardKeepingInput if held[step] else ForwardKeepingOutput
                yield keeping(step + 1)
        elif kind == "reverse":
            yield ForwardKeepingAll(start)
            if start == n_blocks:  # the caller's loss, between forward and backward pass
                yield Backward(start + 1)
            yield Backward(start)


class _Step:
    """The nodes in the order in which the operations ask for them; blocks count from 1.

    order: the nodes so far. available: the tensors that may be read; what is computed outside of
    the held cuts and saved blocks is forgotten, and recomputed if anything reads it.
    """

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self.order: list[str] = []
        self.available = {tensor.name for tensor in graph.resident}
        self.saved_blocks: set[int] = set()
        self._graph = graph
        self._blocks = blocks
        self._ran: set[int] = set()
        # companions are pinned below: they are computed once and never dropped
        self._crossing = blocks.handed_on
        self._held_cuts: set[int] = set()
        self._n_holding: Counter[str] = Counter()  # storage -> how many held cuts it crosses
        self._hold(0)
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
        """Run the block; afterwards its output is there, and its input unless dropped."""
        if block in self._ran:
            nodes = tuple(missing_computes(self._graph, self._at_cut(block), self.available))
            self.order += nodes
        else:
            nodes = self._run_first(block)
        self._hold(block)
        self._forget(name for node in nodes for name in self._graph.node_by_name[node].outputs)
        if drop_input:
            self.release(block - 1)
            self._forget(self._at_cut(block - 1))

    def forward_keeping_all(self, block: int) -> None:
        """Run the block; from now on nothing of it is dropped.

        When it is recomputed, only that is noted: the next operations recompute what they miss.
        """
        self.saved_blocks.add(block)
        self._hold(block)
        if block not in self._ran:
            self._run_first(block)

    def run_later(self, nodes: Iterable[str]) -> None:
        """Run these later nodes, and before each of them what it misses."""
        for name in nodes:
            node = self._graph.node_by_name[name]
            self.order += missing_computes(
                self._graph, self._graph.needs[node.name], self.available
            )
            self.order.append(name)
            self.available.update(node.outputs)

    def release(self, cut: int) -> None:
        """The storages at the cut need not be held for it any longer."""
        if cut in self._held_cuts:
            self._held_cuts.remove(cut)
            self._n_holding.subtract(self._crossing[cut])

    def _run_first(self, block: int) -> tuple[str, ...]:
        nodes = self._blocks.forward[block - 1]
        self._ran.add(block)
        self.order += nodes
        for node in nodes:
            self.available.update(self._graph.node_by_name[node].outputs)
        return nodes

    def _at_cut(self, cut: int) -> list[str]:
        """The tensors of blocks up to the cut on the storages that cross it, without companions."""
        return [
            name
            for storage in self._crossing[cut]
            for name in self._tensors_on[storage]
            if self._block_of[name] <= cut
        ]

    def _hold(self, cut: int) -> None:
        if cut not in self._held_cuts:
            self._held_cuts.add(cut)
            self._n_holding.update(self._crossing[cut])

    def _forget(self, names: Iterable[str]) -> None:
        """Drop these tensors, except those that a held cut or a saved block needs."""
        self.available.difference_update(
            name
            for name in names
            if name not in self._pinned
            and not self._n_holding[self._graph.root(name)]
            and self._block_of[name] not in self.saved_blocks
        )
