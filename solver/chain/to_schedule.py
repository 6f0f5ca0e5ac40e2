"""A chain's answer as an order of the graph's nodes.

The operations are those of the chain problems: forward through a block keeping its output alone,
forward keeping everything, backward. On the graph a block is many nodes that share tensors with
their neighbours; here it is known which tensors each operation leaves, and what is missing runs
again right before it is read. What nobody reads is not run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphs.graph import Graph
from solver.chain.blocks import Blocks
from solver.schedule import (
    Schedule,
    free_after_last_use,
    is_recomputable,
    lost_views,
    missing_computes,
    needs,
    without_dead_computes,
)


class ChainToSchedule:
    """The graph's nodes in the order that chain operations ask for; blocks count from 1."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self._graph = graph
        self._blocks = blocks
        self._available = {tensor.name for tensor in graph.resident}
        self._order: list[str] = []
        self._ran: set[int] = set()
        # companions are pinned below: they come into being once and are never dropped
        self._crossing = [
            tuple(name for name in names if name not in blocks.companions)
            for names in blocks.crossing
        ]
        self._held_cuts: set[int] = set()
        self._n_holding: Counter[str] = Counter()  # by storage: of the held cuts, those it crosses
        self._hold(0)
        self._saved_blocks: set[int] = set()
        self._block_of = {
            name: index
            for index, names in enumerate(blocks.forward, start=1)
            for node in names
            for name in graph.node_by_name[node].outputs
        }
        self._members: dict[str, list[str]] = {}
        for name in self._block_of:
            self._members.setdefault(graph.root(name), []).append(name)
        self._pinned = {
            name
            for node in graph.forward_nodes
            for name in node.outputs
            if graph.root(name) in blocks.companions or not is_recomputable(graph, node)
        }

    def forward_keeping_output(self, block: int, *, drop_input: bool) -> None:
        """Run the block forward; afterwards its output is there, and its input unless dropped."""
        if block in self._ran:
            nodes = missing_computes(self._graph, self._at_cut(block), self._available)
            self._order += nodes
        else:
            nodes = self._run_first(block)
        self._hold(block)
        self._forget(name for node in nodes for name in self._graph.node_by_name[node].outputs)
        if drop_input:
            self._let_go(block - 1)
            self._forget(self._at_cut(block - 1))

    def forward_keeping_all(self, block: int) -> None:
        """Run the block forward; from now on nothing of it is dropped.

        When it runs again, only that is noted: its nodes run when the next operations miss them.
        """
        self._saved_blocks.add(block)
        self._hold(block)
        if block not in self._ran:
            self._run_first(block)

    def backward(self, block: int) -> None:
        """Run the block's backward nodes (block L + 1: the loss that the caller computes)."""
        for name in self._blocks.backward[block - 1]:
            node = self._graph.node_by_name[name]
            self._order += missing_computes(self._graph, needs(self._graph, node), self._available)
            self._order.append(name)
            self._available.update(node.outputs)
        self._saved_blocks.discard(block)
        self._let_go(block)

    def schedule(self) -> Schedule:
        """What was played, with what comes after the backward pass, without dead computations."""
        graph = self._graph
        for name in self._blocks.after:
            node = graph.node_by_name[name]
            self._order += missing_computes(graph, needs(graph, node), self._available)
            self._order.append(name)
        self._order += missing_computes(graph, lost_views(graph, self._order), self._available)
        return free_after_last_use(graph, without_dead_computes(graph, self._order))

    def _run_first(self, block: int) -> list[str]:
        nodes = list(self._blocks.forward[block - 1])
        self._ran.add(block)
        self._order += nodes
        for node in nodes:
            self._available.update(self._graph.node_by_name[node].outputs)
        return nodes

    def _at_cut(self, split_into_blocks: int) -> list[str]:
        """The tensors of blocks up to the cut that are on the storages that cross it, companions
        left out."""
        return [
            name
            for storage in self._crossing[split_into_blocks]
            for name in self._members[storage]
            if self._block_of[name] <= split_into_blocks
        ]

    def _hold(self, split_into_blocks: int) -> None:
        if split_into_blocks not in self._held_cuts:
            self._held_cuts.add(split_into_blocks)
            self._n_holding.update(self._crossing[split_into_blocks])

    def _let_go(self, split_into_blocks: int) -> None:
        if split_into_blocks in self._held_cuts:
            self._held_cuts.remove(split_into_blocks)
            self._n_holding.subtract(self._crossing[split_into_blocks])

    def _forget(self, names: Iterable[str]) -> None:
        """Drop these tensors, except those that a held cut or a saved block needs."""
        self._available.difference_update(
            name
            for name in names
            if name not in self._pinned
            and not self._n_holding[self._graph.root(name)]
            and self._block_of[name] not in self._saved_blocks
        )
