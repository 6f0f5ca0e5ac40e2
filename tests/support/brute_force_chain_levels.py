"""Optimal reversal of short chains with snapshots on several levels, by search over all states.

A state is which step is to be reversed next, which x_i is live, and which snapshots each level
holds. This shares no code with the solver. `replayed` checks a list of actions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

Held = tuple[frozenset[int], ...]
State = tuple[int, int | None, Held]
Slots = Sequence[tuple[int, float, float]]
"""For each level, how many snapshots it can hold, and the costs of writing and reading one."""


def least_cost(n_steps: int, levels: Slots) -> float:
    """The least cost of reversing a chain (inf: impossible), in forward steps that save nothing."""
    start: State = (n_steps, 0, tuple(frozenset() for _ in levels))
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    n_pushed = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[0] == 0:
            return cost
        for more, after in _moves(state, levels):
            if after not in done:
                n_pushed += 1
                heapq.heappush(queue, (cost + more, n_pushed, after))
    return math.inf


def _moves(state: State, levels: Slots) -> Iterator[tuple[float, State]]:
    todo, here, held = state
    if here is not None and here == todo - 1:
        left = tuple(frozenset(i for i in level if i < todo - 1) for level in held)
        yield 0.0, (todo - 1, None, left)
    if here is not None and here < todo - 1:
        yield 1.0, (todo, here + 1, held)
    for k, (n_snapshots, write, read) in enumerate(levels):
        if here is not None and here not in held[k] and len(held[k]) < n_snapshots:
            yield write, (todo, here, (*held[:k], held[k] | {here}, *held[k + 1 :]))
        for i in held[k]:
            if i != here:
                yield read, (todo, i, held)
            yield 0.0, (todo, here, (*held[:k], held[k] - {i}, *held[k + 1 :]))


def replayed(n_steps: int, actions: Sequence[tuple[str, int, int]], levels: Slots) -> float:
    """The cost of these actions. Raises AssertionError if one is illegal, or if steps or snapshots
    are left at the end."""
    todo, cost = n_steps, 0.0
    here: int | None = 0
    held: list[set[int]] = [set() for _ in levels]
    for kind, i, to in actions:
        if kind == "advance":
            assert here == i < to < todo
            here, cost = to, cost + to - i
        elif kind == "reverse":
            assert here == to == i - 1 == todo - 1
            here, todo = None, todo - 1
        elif kind == "store":
            assert here == i
            assert i not in held[to]
            held[to].add(i)
            assert len(held[to]) <= levels[to][0]
            cost += levels[to][1]
        elif kind == "restore":
            assert i in held[to]
            here, cost = i, cost + levels[to][2]
        else:
            assert kind == "drop"
            held[to].remove(i)
    assert todo == 0
    assert not any(held)
    return cost
