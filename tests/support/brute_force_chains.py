"""Optimal schedules of chains, by Dijkstra over all states of the device and by a plain recurrence.

Neither shares code with the solver. The tests simulate the schedules that Dijkstra finds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    Drop,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """A state of the device.

    alone: bit k is set if x_k is live by itself.
    saved: bit i is set if everything that block i saves is live.
    due: the block whose backward is next.
    head: for persistent schedules, the output made last, which the next block may consume (None:
        none). Everything else stays until the backward that reads it.
    """

    alone: int
    saved: int
    due: int
    head: int | None


def brute_force(
    chain: Chain, *, budget_bytes: int, persistent: bool
) -> tuple[float, list[ChainOp]]:
    """Least time and an optimal schedule of a tiny chain; (inf, []) if nothing fits.

    persistent: what is stored stays until the backward that reads it. Otherwise, anything may be
        dropped at any time.
    """
    start = State(alone=1, saved=0, due=chain.n_blocks + 1, head=0 if persistent else None)
    best = {start: 0.0}
    came: dict[State, tuple[State, ChainOp]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    pushed = count(1)  # states have no order
    while queue:
        cost_s, _, state = heapq.heappop(queue)
        if cost_s > best[state]:
            continue
        if state.due == 0:
            return cost_s, path(came, state)
        for op, during_bytes, op_s, after in moves(chain, state, persistent=persistent):
            total_s = cost_s + op_s
            if during_bytes <= budget_bytes and total_s < best.get(after, math.inf):
                best[after] = total_s
                came[after] = state, op
                heapq.heappush(queue, (total_s, next(pushed), after))
    return math.inf, []


def path(came: dict[State, tuple[State, ChainOp]], state: State) -> list[ChainOp]:
    ops = []
    while state in came:
        state, op = came[state]
        ops.append(op)
    return ops[::-1]


def moves(
    chain: Chain, state: State, *, persistent: bool
) -> Iterator[tuple[ChainOp, int, float, State]]:
    """Yield (operation, bytes while it runs, its seconds, the state after it)."""
    n, x, due = chain.n_blocks, chain.input_bytes, state.due
    held = sum(x[k] for k in range(n + 1) if state.alone >> k & 1)
    held += sum(chain.saved_bytes[i] for i in range(1, n + 1) if state.saved >> i & 1)
    held += x[due] if due <= n else 0
    there = state.alone | state.saved  # bit k: x_k is live, by itself or as part of what k saves
    if there >> (due - 1) & 1 and (due == n + 1 or state.saved >> due & 1):
        during = held + x[due - 1] + chain.backward_workspace_bytes[due - 1]
        keep = (1 << (due - 1)) - 1  # drop what later blocks left behind, which nothing reads
        after = State(state.alone & keep, state.saved & (keep << 1 | 1), due - 1, None)
        yield Backward(due), during, chain.backward_s[due - 1], after
    for i in range(1, min(due, n) + 1):
        if not there >> (i - 1) & 1 or state.saved >> i & 1:
            continue
        now = held + chain.forward_workspace_bytes[i - 1]
        cost_s = chain.forward_s[i - 1]
        everything = State(state.alone & ~(1 << i), state.saved | 1 << i, due, None)
        yield ForwardKeepingAll(i), now + chain.saved_bytes[i], cost_s, everything
        if state.alone >> i & 1:
            continue
        checkpointed = State(state.alone | 1 << i, state.saved, due, i if persistent else None)
        yield ForwardKeepingInput(i), now + x[i], cost_s, checkpointed
        if state.head == i - 1:
            moved = replace(checkpointed, alone=checkpointed.alone & ~(1 << (i - 1)))
            yield ForwardKeepingOutput(i), now + x[i], cost_s, moved
    if not persistent:
        for k in range(n + 1):
            if state.alone >> k & 1:
                yield Drop(k), 0, 0.0, replace(state, alone=state.alone & ~(1 << k))


def plain_recurrence(chain: Chain, *, budget_bytes: int) -> float:
    """The least cost of a persistent schedule, with an entry for each byte and no short cuts. Too
    slow for real sizes.

    extra[s, t][m] is the least time of forwards that save nothing, for blocks s .. t (L + 1 is the
    loss), within m bytes. These do not include x_{s-1}, which the caller counts.
    """
    n, x = chain.n_blocks, (*chain.input_bytes, 0)
    saved = (*chain.saved_bytes, 0)
    forward_s = (0.0, *chain.forward_s, 0.0)
    workspace = (0, *chain.forward_workspace_bytes, 0)
    later_workspace = (0, *chain.backward_workspace_bytes)
    if budget_bytes < x[0]:
        return math.inf
    m = np.arange(budget_bytes - x[0] + 1)
    extra = np.full((n + 2, n + 2, len(m)), math.inf)
    beside_x = np.full((n + 2, n + 2, len(m)), math.inf)  # extra[s, t][m - x_{s-1}]
    for s in range(n + 1, 0, -1):
        passing = np.zeros((0, 1), dtype=int)  # by split k: the most bytes while s .. k - 1 run
        ran_s = np.zeros((0, 1))
        for t in range(s, n + 2):
            forward = x[t] + saved[s] + workspace[s]
            backward = x[s] + saved[s] + x[s - 1] + later_workspace[s]
            # either block s saves everything and its backward follows those of s + 1 .. t, ...
            saves = np.zeros(len(m)) if s == t else _beside(extra[s + 1, t], saved[s])
            best = np.where(m >= max(forward, backward), saves, math.inf)
            if s < t:  # ... or blocks s .. k - 1 run without saving, up to some split k
                last = (x[t - 2] if t - 1 > s else 0) + x[t - 1] + workspace[t - 1]
                passing = np.vstack([passing, max(passing.max(initial=0), last)])
                ran_s = np.vstack([ran_s, ran_s.max(initial=0) + forward_s[t - 1]])
                splits = ran_s + beside_x[s + 1 : t + 1, t] + extra[s, s:t]
                splits[m < x[t] + passing] = math.inf
                best = np.minimum(best, splits.min(axis=0))
            extra[s, t] = best
            beside_x[s, t] = _beside(best, x[s - 1])
    return sum(chain.forward_s) + sum(chain.backward_s) + float(extra[1, n + 1, -1])


def _beside(extra_s: Array, held: int) -> Array:
    """extra_s[m - held] for each m; inf where m is less than `held`."""
    m = np.arange(len(extra_s))
    return np.where(m >= held, extra_s[np.maximum(m - held, 0)], math.inf)
