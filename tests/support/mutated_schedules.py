"""Schedules with one op changed: most are illegal."""

from __future__ import annotations

import random
from collections.abc import Iterable

from graphs.graph import Graph
from solver.schedule.ops import Compute, Free, Op


def mutant(
    graph: Graph, ops: tuple[Op, ...], rng: random.Random, *, extra: Iterable[Op] = ()
) -> tuple[Op, ...]:
    """The ops after one random change: drop, swap, duplicate, replace, insert or move one.

    extra: further ops that may be put in.
    """
    changed = list(ops)
    here, there = rng.randrange(len(changed)), rng.randrange(len(changed))
    anything: list[Op] = [
        Compute(rng.choice(graph.nodes).name),
        Free(rng.choice(graph.tensors).name),
        rng.choice(ops),
        *extra,
    ]
    kind = rng.randrange(6)
    if kind == 0:
        del changed[here]
    elif kind == 1:
        changed[here], changed[there] = changed[there], changed[here]
    elif kind == 2:
        changed.insert(there, changed[here])
    elif kind == 3:
        changed[here] = rng.choice(anything)
    elif kind == 4:
        changed.insert(here, rng.choice(anything))
    else:
        changed.insert(there, changed.pop(here))
    return tuple(changed)
