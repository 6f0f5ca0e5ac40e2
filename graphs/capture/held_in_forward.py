"""Finds out what eager mode holds in the forward pass without reading it, which no graph shows.

A variable keeps its tensor alive until it is assigned again or its function returns, and a module's
call keeps its arguments alive. So it is recorded when each storage is freed.

Dead code is left out of a trace: operators whose results reach no output, such as a copy of the
attention scores that is only put into a list. Eager mode runs them, and variables hold the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from graphs.capture.eager_calls import EagerCall, EagerCalls, matching_pairs, operator_name
from graphs.capture.extraction import Layout
from graphs.graph import Node

_CALLS_AHEAD = 16
"""How many eager calls to look ahead for the next traced operator: others may be in between."""


@dataclass(frozen=True)
class DeadResult:
    """A tensor that dead code makes in eager mode.

    name: unique among the tensors of the step.
    after: the forward node after which it is made.
    until: the forward node until which it is held.
    """

    name: str
    after: str
    until: str
    size_bytes: int


@dataclass(frozen=True)
class DeadCall:
    """An operator call of dead code in eager mode.

    operator: its full name, that of an in-place operator too ("aten.mul_.Tensor").
    module: path of the module that makes the call.
    after: the forward node after which it is made ("": before all of them).
    """

    operator: str
    module: str
    after: str


class EagerForward:
    """The calls of a forward pass in eager mode, next to the nodes of its trace.

    eager: the calls of the forward pass, which has returned; its outputs may still be alive.
    returned: numbers of the storages that the forward pass returns.
    saved: numbers of those that autograd saves for the backward pass.
    node_at: index of a call -> the node that stands for it.
    """

    def __init__(
        self, layout: Layout, eager: EagerCalls, *, returned: Set[int], saved: Set[int]
    ) -> None:
        self._layout, self._eager, self._returned = layout, eager, returned
        nodes = [node for node in layout.nodes if node.phase == "forward" and node.outputs]
        # A trace has no other calls: dead code is left out, unless it draws random numbers. What
        # only the backward pass reads is not dead: a copy of what an operator in place overwrites.
        may_be_traced = self._with_needed(
            call.index
            for call in eager.calls
            if call.is_random or not saved.isdisjoint(call.storages)
        )
        self._pairs: list[tuple[Node, EagerCall]] = list(
            matching_pairs(
                nodes,
                [call for call in eager.calls if call.index in may_be_traced],
                lambda node, call: operator_name(node.op) == call.name,
                n_look_ahead=_CALLS_AHEAD,
            )
        )
        self.node_at = {call.index: node.name for node, call in self._pairs}
        # for each call: the last matched node that has run when it ends
        self._last_run: list[str] = []
        for index in range(len(eager.calls)):
            self._last_run.append(
                self.node_at.get(index, self._last_run[-1] if self._last_run else "")
            )

    @property
    def is_known(self) -> bool:
        """False if an operator of eager mode is traced as several operators, by Python code with
        variables of its own (`graphs.capture.as_eager.rnn`)."""
        return not self._layout.held_within_call

    def held(self, *, forward_only: bool = False) -> dict[str, tuple[str, ...]]:
        """Forward node -> tensors that stay alive until it has run, after their last reader.

        forward_only: whether to ignore that the backward pass reads tensors.
        """
        layout, eager = self._layout, self._eager
        position = {node.name: at for at, node in enumerate(layout.nodes)}
        readers = layout.nodes
        if forward_only:
            readers = [node for node in readers if node.phase == "forward"]
        read_last = {name: position[node.name] for node in readers for name in node.inputs}
        held: dict[str, list[str]] = {}
        for node, call in self._pairs:
            for name, storage in zip(node.outputs, call.storages, strict=False):
                # The tensor ends when its storage is freed or overwritten: in a trace, what a later
                # call writes is another tensor, with an end of its own.
                overwritten_at = (
                    1 + index for index in eager.written.get(storage, ()) if index > call.index
                )
                until = self._last_run[min((self._freed(storage), *overwritten_at)) - 1]
                if position.get(until, -1) > read_last.get(name, position[node.name]):
                    held.setdefault(until, []).append(name)
        return {until: tuple(names) for until, names in held.items()}

    def dead(self) -> tuple[DeadResult, ...]:
        """The results of dead code that take memory, in order."""
        eager = self._eager
        results = (
            (call, storage)
            for call in self._dead
            if not call.overwrites
            for storage in call.storages
            if eager.size_bytes[storage]  # batch norm makes an empty tensor
        )
        return tuple(
            DeadResult(
                f"dead_{number}",
                after=self._last_run[call.index],
                until=self._last_run[self._freed(storage) - 1],
                size_bytes=eager.size_bytes[storage],
            )
            for number, (call, storage) in enumerate(results)
            if self._last_run[call.index]
        )

    def dead_calls(self) -> tuple[DeadCall, ...]:
        """The operator calls of dead code, in order."""
        return tuple(
            DeadCall(call.operator, call.module, after=self._last_run[call.index])
            for call in self._dead
        )

    @cached_property
    def _dead(self) -> list[EagerCall]:
        needed = self._with_needed(call.index for _, call in self._pairs)
        return [call for call in self._eager.calls if call.index not in needed]

    def _with_needed(self, indices: Iterable[int]) -> set[int]:
        """These calls, those whose effects remain after the forward pass, and all calls whose
        results they read."""
        eager, returned = self._eager, self._returned
        allocated = {s for call in eager.calls if not call.overwrites for s in call.storages}
        needed = set(indices)
        for call in reversed(eager.calls):
            # what the step did not allocate is changed for good
            has_effect = any(s in returned or s not in allocated for s in call.storages)
            read = (at for s in call.storages for at in eager.read.get(s, ()) if at > call.index)
            if has_effect or not needed.isdisjoint(read):
                needed.add(call.index)
        return needed

    def _freed(self, storage: int) -> int:
        return self._eager.freed.get(storage, len(self._eager.calls))


def held_with_dead(
    held: Mapping[str, Sequence[str]], dead: Sequence[DeadResult]
) -> dict[str, tuple[str, ...]]:
    """Forward node -> tensors that stay alive until it has run, with the results of dead code."""
    found = {until: tuple(names) for until, names in held.items()}
    for each in dead:
        if each.until != each.after:
            found[each.until] = (*found.get(each.until, ()), each.name)
    return found
