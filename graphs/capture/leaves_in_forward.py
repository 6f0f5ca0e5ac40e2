"""Finds out what eager mode computes for leaves that `forward` makes, which no graph shows.

`x = x.detach().requires_grad_()` makes a leaf: a force field differentiates its energy with respect
to such positions. `loss.backward()` then computes the gradient of the leaf too, although nothing
reads it. A trace, and so each plan, leaves these operators out: they are dead code of the backward
pass. The step runs twice on fake tensors, without them and with them, and the calls are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphs.capture.eager_calls import EagerCall, EagerCalls
from graphs.capture.extraction import Layout
from graphs.model_calls import autograd_functions

_NO_NUMBER = 1 << 62
"""The functions that accumulate gradients have sequence numbers above it, the same in each run."""


@dataclass(frozen=True)
class DeadGradient:
    """A tensor that the backward pass makes for the gradient of such a leaf.

    name: unique among the tensors and nodes of the step.
    after: the backward node after which it is made.
    """

    name: str
    operator: str
    after: str
    size_bytes: int


@dataclass(frozen=True)
class DeadBackward:
    """What the backward pass computes for such leaves.

    gradients: in the order in which they are made.
    held: backward node or name of a dead gradient -> tensors that live until it has run.
    """

    gradients: tuple[DeadGradient, ...] = ()
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def makes_leaves(outputs: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass from these outputs reaches leaves other than these."""
    known = {id(leaf) for leaf in leaves}
    ends = (function for function in autograd_functions(outputs) if hasattr(function, "variable"))
    return any(id(end.variable) not in known for end in ends)


@dataclass(frozen=True)
class WholeStep:
    """The calls of a step, forward and backward pass, in eager mode.

    n_forward: how many of the calls are before the backward pass.
    first_number: the sequence number of some autograd function, the same one in each step.
    """

    eager: EagerCalls
    n_forward: int
    first_number: int

    @property
    def backward_calls(self) -> Sequence[EagerCall]:
        return self.eager.calls[self.n_forward :]

    def read_by_call(self) -> Mapping[int, frozenset[int]]:
        """Index of a call -> numbers of the storages that it reads."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for storage, indices in self.eager.read.items():
            for index in indices:
                found[index].add(storage)
        return {index: frozenset(storages) for index, storages in found.items()}

    def held_until(self, node_at: Mapping[int, str]) -> Mapping[int, str]:
        """Number of a storage that lives in the backward pass -> the node that has run last when it
        is freed. node_at: index of a call of the backward pass -> the node that stands for it."""
        ran = [""]  # after each call of the backward pass: the last node that has run
        for call in self.backward_calls:
            ran.append(node_at.get(call.index, ran[-1]))
        freed = ((each, self.eager.freed.get(each)) for each in self.eager.size_bytes)
        n_calls = {s: len(ran) - 1 if at is None else at - self.n_forward for s, at in freed}
        return {storage: ran[n] for storage, n in n_calls.items() if n > 0 and ran[n]}


def dead_backward(
    layout: Layout, live: WholeStep, full: WholeStep, *, node_at: Mapping[int, str]
) -> DeadBackward:
    """Compare a step whose backward pass goes to the step's leaves alone with one to all leaves.

    Returns nothing if the first one is not a part of the second one.

    node_at: index of a call in the first step -> the node that stands for it.
    """
    live_at = _live_calls(live, full)
    last_run = ""
    position = {node.name: at for at, node in enumerate(layout.nodes)}
    backward_nodes: dict[int, str] = {}
    for at, name in sorted(node_at.items()):
        # The trace may have some in another order: these count as the last one before them.
        if at >= live.n_forward and position[name] > position.get(last_run, -1):
            last_run = backward_nodes[at] = name
    if len(live_at) < len(live.eager.calls) or not backward_nodes:
        return DeadBackward()
    eager = full.eager
    first_node = backward_nodes[min(backward_nodes)]
    gradients: dict[int, DeadGradient] = {}  # by storage
    after = first_node
    node_in_full: dict[int, str] = {}
    for call in full.backward_calls:
        if call.index in live_at:
            if live_at[call.index] in backward_nodes:
                after = node_in_full[call.index] = backward_nodes[live_at[call.index]]
        elif not call.overwrites:
            for storage in call.storages:
                if eager.size_bytes[storage]:
                    name = f"dead_backward_{len(gradients)}"
                    size_bytes = eager.size_bytes[storage]
                    gradients[storage] = DeadGradient(name, call.operator, after, size_bytes)
                    node_in_full[call.index] = name
    until, until_if_live = full.held_until(node_in_full), live.held_until(backward_nodes)
    held: defaultdict[str, list[str]] = defaultdict(list)
    for storage, gradient in gradients.items():
        if until[storage] != gradient.name:
            held[until[storage]].append(gradient.name)
    # the tensors of the trace that live longer because of these
    outputs = {node.name: node.outputs for node in layout.nodes}
    for at, live_index in live_at.items():
        names = outputs[node_at[live_index]] if live_index in node_at else ()
        storages = zip(eager.calls[at].storages, live.eager.calls[live_index].storages, strict=True)
        for name, (storage, if_live) in zip(names, storages, strict=False):
            is_overwritten = any(index > at for index in eager.written.get(storage, ()))
            last = until.get(storage)
            if last is None or last == until_if_live.get(if_live) or is_overwritten:
                continue
            if position.get(last, len(position)) > position[node_at[live_index]]:
                held[last].append(name)
    return DeadBackward(
        tuple(gradients.values()), {last: tuple(names) for last, names in held.items()}
    )


def _live_calls(live: WholeStep, full: WholeStep) -> dict[int, int]:
    """Index of a call in `full` -> index of the call in `live` that it repeats."""
    offset = full.first_number - live.first_number
    read, read_in_full = live.read_by_call(), full.read_by_call()
    calls_of: defaultdict[int, list[EagerCall]] = defaultdict(list)
    for call in full.backward_calls:
        calls_of[_number(call, 0)].append(call)
    live_at: dict[int, int] = {}
    same: dict[int, int] = {}  # number of a storage in `live` -> in `full`
    for call in live.eager.calls:
        is_forward = call.index < live.n_forward
        others = full.eager.calls[call.index :] if is_forward else calls_of[_number(call, offset)]
        reads = {same[each] for each in read.get(call.index, ()) if each in same}
        for position, other in enumerate(others[:1] if is_forward else others):
            if other.operator == call.operator and reads == read_in_full.get(other.index, set()):
                live_at[other.index] = call.index
                same |= zip(call.storages, other.storages, strict=False)
                if not is_forward:
                    del others[: position + 1]
                break
    return live_at


def _number(call: EagerCall, offset: int) -> int:
    """The number of the autograd function that makes the call; -1: none does."""
    if call.function is None:
        return -1
    return call.function if call.function > _NO_NUMBER else call.function + offset
