"""A reversal of equal steps, as `reversal` and the methods on levels return it, in chain ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from solver.chain.binomial import Action
from solver.chain.problem import (
    Backward,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
)


def reversal_ops(n_blocks: int, actions: Iterable[Action]) -> Iterator[ChainOp]:
    """Step i of the reversal is block i + 1; a snapshot on any level is held."""
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
