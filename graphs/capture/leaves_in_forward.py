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
    operator: what makes it (None: `after` does, as a further result).
    after: the backward node after which it is made.
    """

    name: str
    operator: str | None
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
    layout: Layout, short: WholeStep, full: WholeStep, *, node_at: Mapping[int, str]
) -> DeadBackward:
    """Compare a step whose backward pass goes to the step's leaves alone with one to all leaves.

    Returns nothing if the first one is not a part of the second one.

    node_at: index of a call in the first step -> the node that stands for it.
    """
    shared_at = _shared_calls(short, full)
    last_run = ""
    position = {node.name: at for at, node in enumerate(layout.nodes)}
    backward_nodes: dict[int, str] = {}
    for at, name in sorted(node_at.items()):
        # The trace may have some in another order: these count as the last one before them.
        if at >= short.n_forward and position[name] > position.get(last_run, -1):
            last_run = backward_nodes[at] = name
    if len(shared_at) < len(short.eager.calls) or not backward_nodes:
        return DeadBackward()
    eager = full.eager
    first_node = backward_nodes[min(backward_nodes)]
    gradients: dict[int, DeadGradient] = {}  # by storage
    after = first_node
    node_in_full: dict[int, str] = {}
    for call in full.backward_calls:
        is_shared = call.index in shared_at
        known_places: tuple[int, ...] = ()
        if is_shared:
            known_places = short.eager.calls[shared_at[call.index]].places
            if shared_at[call.index] in backward_nodes:
                after = node_in_full[call.index] = backward_nodes[shared_at[call.index]]
        for place, storage in zip(call.places, call.storages, strict=True):
            size_bytes = 0 if call.overwrites else eager.size_bytes[storage]
            if size_bytes and place not in known_places:
                name = f"dead_backward_{len(gradients)}"
                operator = None if is_shared else call.operator
                gradients[storage] = DeadGradient(name, operator, after, size_bytes)
                if not is_shared:
                    node_in_full[call.index] = name
    until, until_in_short = full.held_until(node_in_full), short.held_until(backward_nodes)
    held: defaultdict[str, list[str]] = defaultdict(list)
    for storage, gradient in gradients.items():
        if until[storage] not in (gradient.name, gradient.after):
            held[until[storage]].append(gradient.name)
    # the tensors of the trace that live longer because of these
    outputs = {node.name: node.outputs for node in layout.nodes}
    for at, short_index in shared_at.items():
        names = outputs[node_at[short_index]] if short_index in node_at else ()
        at_place = dict(zip(eager.calls[at].places, eager.calls[at].storages, strict=True))
        call = short.eager.calls[short_index]
        for name, place, in_short in zip(names, call.places, call.storages, strict=False):
            storage = at_place[place]
            is_overwritten = any(index > at for index in eager.written.get(storage, ()))
            last = until.get(storage)
            if last is None or last == until_in_short.get(in_short) or is_overwritten:
                continue
            if position.get(last, len(position)) > position[node_at[short_index]]:
                held[last].append(name)
    return DeadBackward(
        tuple(gradients.values()), {last: tuple(names) for last, names in held.items()}
    )


def _shared_calls(short: WholeStep, full: WholeStep) -> dict[int, int]:
    """Index of a call in `full` -> index of the call in `short` that it repeats."""
    offset = full.first_number - short.first_number
    read, read_in_full = short.read_by_call(), full.read_by_call()
    calls_of: defaultdict[int, list[EagerCall]] = defaultdict(list)
    for call in full.backward_calls:
        calls_of[_number(call, 0)].append(call)
    shared_at: dict[int, int] = {}
    same: dict[int, int] = {}  # number of a storage in `short` -> in `full`
    for call in short.eager.calls:
        is_forward = call.index < short.n_forward
        if is_forward:
            others = full.eager.calls[call.index : call.index + 1]
        else:
            others = calls_of[_number(call, offset)]
        reads = {same[each] for each in read.get(call.index, ()) if each in same}
        for position, other in enumerate(others):
            at_place = dict(zip(other.places, other.storages, strict=True))
            if (
                other.operator == call.operator
                and reads == read_in_full.get(other.index, set())
                and at_place.keys() >= {*call.places}
            ):
                shared_at[other.index] = call.index
                pairs = zip(call.places, call.storages, strict=True)
                same |= {storage: at_place[place] for place, storage in pairs}
                if not is_forward:
                    del others[: position + 1]
                break
    return shared_at


def _number(call: EagerCall, offset: int) -> int:
    """The number of the autograd function that makes the call; -1: none does."""
    if call.function is None:
        return -1
    return call.function if call.function > _NO_NUMBER else call.function + offset
