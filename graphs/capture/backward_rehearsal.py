"""What eager mode's backward functions overwrite, and drop before they return.

A traced function of the backward pass is a list of functional operators. Its code in C++ may work
in place (`sigmoid(x).sub_(target).mul_(grad)`), and drops what an expression has computed where the
expression ends. That is in no graph, and only the code knows it. So the step runs once on fake
tensors, in eager mode, and each function's calls are compared with its traced operators.

What eager mode writes into a part of a tensor is two operators in a trace: one computes the part,
and a scatter makes the tensor anew with it. In eager mode both are on that tensor's storage.

Autograd may also save more than a backward function reads (`fft_r2c` saves its input for the number
of columns), so the rehearsal notes what each function has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import torch

from graphs.capture.eager_calls import EagerCall, EagerCalls, packet
from graphs.capture.extraction import Layout
from graphs.capture.without_subclasses import without_subclasses

SCATTERS = frozenset(
    f"aten.{name}_scatter" for name in ("slice", "select", "diagonal", "as_strided")
)
"""What a trace has besides the operator where eager mode writes into a view."""

N_AHEAD = 8
"""Functions to look ahead for the next traced one: some have no operators left in the trace."""


@dataclass(frozen=True)
class Rehearsed:
    """in_place: backward nodes that overwrite their first input in eager mode.

    dropped: tensor that a backward function makes -> the node of it after which it is dropped,
        where that is not the last.
    saved: node -> tensors that stay until it has run, read or not. Of a backward node what autograd
        has saved for its function, or for one after it without nodes; of a forward node what
        variables of forward hold.
    """

    in_place: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Saved:
    """By an autograd function called `function` ("MulBackward0"), under these names of arguments
    and results."""

    function: str
    names: tuple[str, ...]


class BackwardCalls(EagerCalls):  # type: ignore[no-untyped-call]
    """While entered, records the operators that functions of autograd run, views left out.

    functions: the calls of each, in the order in which they run.
    numbers: the sequence number of each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[list[EagerCall]] = []
        self.numbers: list[int] = []
        self._function: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is None or (call := self.noted(func, args, kwargs or {}, value)) is None:
            return value
        if (number := node._sequence_nr()) != self._function:
            self._function = number
            self.functions.append([])
            self.numbers.append(number)
        self.functions[-1].append(call)
        return value


def saved_by_functions(outputs: Iterable[torch.Tensor]) -> dict[int, _Saved]:
    """Sequence number of each function that computes the gradients of outputs -> what it holds.

    To be called before the backward pass, which releases it.
    """
    found: dict[int, _Saved] = {}
    ahead = [item.grad_fn for item in outputs]
    seen: set[Any] = {None}
    while ahead:
        node: Any = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        names = [name for name in dir(node) if name.startswith(_SAVED)]
        tensors = [name for name in names if isinstance(getattr(node, name), torch.Tensor)]
        found[node._sequence_nr()] = _Saved(
            node.name(), tuple(name.removeprefix(_SAVED) for name in tensors)
        )
        ahead += [each for each, _ in node.next_functions]
    return found


_SAVED = "_saved_"


def compared(layout: Layout, calls: BackwardCalls, saved: Mapping[int, _Saved]) -> Rehearsed:
    """The functions of the trace that run the same operators in eager mode.

    saved: as `saved_by_functions` has it.
    """
    in_place: list[str] = []
    dropped: dict[str, str] = {}
    outputs = {node.name: node.outputs for node in layout.nodes}
    op = {node.name: packet(node.op) for node in layout.nodes}
    numbers, traced = list(layout.functions), list(layout.functions.values())
    number_of: dict[int, int] = {}  # of a function in eager mode -> in the trace
    for which, at in _matched(traced, calls.functions, op):
        function = _own_calls(traced[which], calls.functions[at], op)
        assert function is not None  # they match
        number_of[calls.numbers[at]] = numbers[which]
        members = _without_scatters(traced[which], op, len(function))
        in_place += [name for name in traced[which] if name not in members]
        for name, call in zip(members, function, strict=True):
            if call.overwrites:
                in_place.append(name)
            for out, storage in zip(outputs[name], call.storages, strict=False):
                freed = calls.freed.get(storage, calls.n_calls)
                during = [m for m, c in zip(members, function, strict=True) if c.index < freed]
                if during[-1] != members[-1]:
                    dropped[out] = during[-1]
    in_place += without_subclasses(layout)
    return Rehearsed(tuple(dict.fromkeys(in_place)), dropped, _held(layout, number_of, saved))


def _held(
    layout: Layout, number_of: Mapping[int, int], saved: Mapping[int, _Saved]
) -> dict[str, tuple[str, ...]]:
    """Node -> tensors saved for its function, or for later ones that only make views.

    number_of: number of a function in eager mode -> in the trace. Others are as far from the
        next higher one there; the engine runs functions from the highest number to the lowest.
    """
    held: dict[str, tuple[str, ...]] = {}
    forward = _forward_calls(layout)
    node_by_name = {node.name: node for node in layout.nodes}
    offset: int | None = None
    for number in sorted(saved, reverse=True):
        if number in number_of:
            offset = number_of[number] - number
        if offset is None or not saved[number].names:
            continue
        in_trace = number + offset
        calls = [call for call in forward.get(in_trace, []) if _is_of(call, saved[number])]
        arguments: tuple[str, ...] = ()
        if len(calls) == 1:
            made = node_by_name[calls[0].name].outputs
            arguments = _saved_tensors(layout, calls[0], made, saved[number])
        function = layout.functions.get(in_trace, ())
        read = {name for member in function for name in node_by_name[member].inputs}
        if unread := [name for name in arguments if name not in read]:
            before = [each for each in layout.functions if each >= in_trace]
            last = layout.functions[before[-1]][-1]
            held[last] = tuple(dict.fromkeys((*held.get(last, ()), *unread)))
    return held


def _forward_calls(layout: Layout) -> dict[int, list[torch.fx.Node]]:
    """Sequence number -> the operators of the forward pass with it: the differentiable one, and
    others that ran between the one before it and itself."""
    found: dict[int, list[torch.fx.Node]] = {}
    for node in layout.nodes:
        call = layout.calls.get(node.name)
        if node.phase == "backward" or call is None:
            continue
        if (number := call.meta.get("seq_nr")) is not None:
            found.setdefault(number, []).append(call)
    return found


def _matched(
    traced: Sequence[Sequence[str]], eager: Sequence[Sequence[EagerCall]], op: Mapping[str, str]
) -> Iterator[tuple[int, int]]:
    """Positions in both, which are in order. Functions without a counterpart are left out."""
    start = 0
    for which, members in enumerate(traced):
        for at, function in enumerate(islice(eager, start, start + N_AHEAD), start):
            if _own_calls(members, function, op) is not None:
                yield which, at
                start = at + 1
                break


def _own_calls(
    members: Sequence[str], function: Sequence[EagerCall], op: Mapping[str, str]
) -> Sequence[EagerCall] | None:
    """The calls of a function, if they run the same operators, where a scatter follows each call
    that overwrites.

    What the engine adds up after a function has returned, its gradients and those that are there
    already, counts as its last calls in eager mode; in the trace it is of no function.
    """
    n_sums = sum(1 for _ in takewhile(lambda call: call.name == _SUM, reversed(function)))
    for n_calls in range(len(function), len(function) - n_sums - 1, -1):
        if _is_same(members, function[:n_calls], op):
            return function[:n_calls]
    return None


_SUM = "aten.add"


def _is_same(members: Sequence[str], function: Sequence[EagerCall], op: Mapping[str, str]) -> bool:
    """Whether they run the same operators, where a scatter follows each call that overwrites."""
    kept = _without_scatters(members, op, len(function))
    if [op[name] for name in kept] != [call.name for call in function]:
        return False
    calls = iter(function)
    overwrites = False
    for name in members:
        if name in kept:
            overwrites = next(calls).overwrites
        elif not overwrites:
            return False
    return True


def _without_scatters(members: Sequence[str], op: Mapping[str, str], n_calls: int) -> Sequence[str]:
    """The members that eager mode calls: all of them where it makes as many calls."""
    if len(members) == n_calls:
        return members
    return [name for name in members if op[name] not in SCATTERS]


def _is_of(call: torch.fx.Node, saved: _Saved) -> bool:
    """Whether it is the operator whose function has saved this."""
    operator = packet(str(call.target)).removeprefix("aten.").replace("_", "")
    return saved.function.lower().startswith(operator + "backward")


def _saved_tensors(
    layout: Layout, call: torch.fx.Node, made: Sequence[str], saved: _Saved
) -> tuple[str, ...]:
    """The tensors that are saved of an operator's arguments and results. made: its results.

    What it overwrites is left out: autograd saves a copy of that, which the trace reads.
    """
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return ()
    given: dict[str, Any] = dict(call.kwargs)
    given |= {a.name: value for a, value in zip(schema.arguments, call.args, strict=False)}
    if call.name in layout.in_place:
        given.pop(schema.arguments[0].name, None)
    values = {name: each for name, each in given.items() if isinstance(each, torch.fx.Node)}
    held = {name: layout.storage.get(value) for name, value in values.items()}
    held |= {f"{_RESULT}{at}": name for at, name in enumerate(made)}
    if len(made) == 1:
        held[_RESULT] = made[0]
    found = (held.get(name) for name in saved.names)
    return tuple(dict.fromkeys(name for name in found if name is not None))


_RESULT = "result"
"""What autograd calls the results of an operator: this, or with a number where it has several."""
