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
from itertools import groupby, takewhile
from typing import Any

import torch

from graphs.capture.eager_calls import EagerCall, EagerCalls, matched, packet
from graphs.capture.extraction import Layout

_SCATTERS = frozenset(
    f"aten.{name}_scatter" for name in ("slice", "select", "diagonal", "as_strided")
)
"""What a trace has besides the operator where eager mode writes into a view."""

_N_AHEAD = 8
"""Functions to look ahead for the next traced one: some have no operators left in the trace."""


@dataclass(frozen=True)
class Rehearsed:
    """in_place: backward nodes that overwrite their first input in eager mode.

    dropped: tensor that a backward function makes -> the node of it after which it is dropped,
        where that is not the last.
    saved: node -> tensors that stay until it has run, read or not. Of a backward node what autograd
        has saved for its function, or for one after it without nodes; of a forward node what
        variables of forward hold.
    in_calls: forward node -> what they hold where autograd saves nothing; None: not known.
    """

    in_place: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_calls: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class _Saved:
    """By an autograd function called `function` ("MulBackward0"), under these names of arguments
    and results; conjugated: those that are on the storage of what they are the conjugate of, where
    a trace has it computed."""

    function: str
    names: tuple[str, ...]
    conjugated: frozenset[str] = frozenset()


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
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = {name.removeprefix("_saved_"): getattr(node, name) for name in names}
        tensors = {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}
        conjugated = frozenset(name for name, each in tensors.items() if each.is_conj())
        found[node._sequence_nr()] = _Saved(node.name(), tuple(tensors), conjugated)
        ahead += [each for each, _ in node.next_functions]
    return found


def compared(layout: Layout, eager: EagerCalls, saved: Mapping[int, _Saved]) -> Rehearsed:
    """The functions of the trace that run the same operators in eager mode.

    saved: as `saved_by_functions` has it.
    """
    in_place: list[str] = []
    dropped: dict[str, str] = {}
    outputs = {node.name: node.outputs for node in layout.nodes}
    op = {node.name: packet(node.op) for node in layout.nodes}
    in_functions = (call for call in eager.calls if call.function is not None)
    functions = [list(group) for _, group in groupby(in_functions, lambda call: call.function)]
    number_of: dict[int, int] = {}  # of a function in eager mode -> in the trace
    for (number, traced), calls in matched(
        [*layout.functions.items()],
        functions,
        lambda one, other: _own_calls(one[1], other, op) is not None,
        n_ahead=_N_AHEAD,
    ):
        function = _own_calls(traced, calls, op)
        assert function is not None  # they match
        assert calls[0].function is not None
        number_of[calls[0].function] = number
        members = _without_scatters(traced, op, len(function))
        in_place += [name for name in traced if name not in members]
        for name, call in zip(members, function, strict=True):
            if call.overwrites:
                in_place.append(name)
            for out, storage in zip(outputs[name], call.storages, strict=False):
                freed = eager.freed.get(storage, len(eager.calls))
                during = [m for m, c in zip(members, function, strict=True) if c.index < freed]
                if during[-1] != members[-1]:
                    dropped[out] = during[-1]
    in_place += _without_subclasses(layout)
    return Rehearsed(tuple(dict.fromkeys(in_place)), dropped, _held(layout, number_of, saved))


def _own_calls(
    members: Sequence[str], function: Sequence[EagerCall], op: Mapping[str, str]
) -> Sequence[EagerCall] | None:
    """The calls of a function, if they run the same operators, where a scatter follows each call
    that overwrites.

    What the engine adds up after a function has returned, its gradients and those that are there
    already, counts as its last calls in eager mode; in the trace it is of no function.
    """
    n_sums = sum(1 for _ in takewhile(lambda call: call.name == "aten.add", reversed(function)))
    for n_calls in range(len(function), len(function) - n_sums - 1, -1):
        kept = _without_scatters(members, op, n_calls)
        own = function[:n_calls]
        if [op[name] for name in kept] != [call.name for call in own]:
            continue
        calls, overwrites, is_same = iter(own), False, True
        for name in members:
            if name in kept:
                overwrites = next(calls).overwrites
            else:
                is_same &= overwrites
        if is_same:
            return own
    return None


def _without_scatters(members: Sequence[str], op: Mapping[str, str], n_calls: int) -> Sequence[str]:
    """The members that eager mode calls: all of them where it makes as many calls."""
    if len(members) == n_calls:
        return members
    return [name for name in members if op[name] not in _SCATTERS]


def _held(
    layout: Layout, number_of: Mapping[int, int], saved: Mapping[int, _Saved]
) -> dict[str, tuple[str, ...]]:
    """Node -> tensors saved for its function, or for later ones that only make views.

    number_of: number of a function in eager mode -> in the trace. Others are as far from the
        next higher one there; the engine runs functions from the highest number to the lowest.
    """
    node_by_name = {node.name: node for node in layout.nodes}
    # Operators of the forward pass by number: the differentiable one, and others that ran between
    # the one before it and itself.
    forward: dict[int, list[torch.fx.Node]] = {}
    for name, call in layout.calls.items():
        if node_by_name[name].phase != "backward" and "seq_nr" in call.meta:
            forward.setdefault(call.meta["seq_nr"], []).append(call)
    held: dict[str, tuple[str, ...]] = {}
    offset: int | None = None
    for number in sorted(saved, reverse=True):
        if number in number_of:
            offset = number_of[number] - number
        if offset is None or not saved[number].names:
            continue
        in_trace = number + offset
        calls = [
            call
            for call in forward.get(in_trace, [])
            if saved[number]
            .function.lower()
            .startswith(
                packet(str(call.target)).removeprefix("aten.").replace("_", "") + "backward"
            )
        ]
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


def _saved_tensors(
    layout: Layout, call: torch.fx.Node, made: Sequence[str], saved: _Saved
) -> tuple[str, ...]:
    """The tensors that are saved of an operator's arguments and results. made: its results."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return ()
    given: dict[str, Any] = dict(call.kwargs)
    given |= {a.name: value for a, value in zip(schema.arguments, call.args, strict=False)}
    if call.name in layout.in_place:  # autograd saves a copy, which the trace reads
        given.pop(schema.arguments[0].name, None)
    values = {name: each for name, each in given.items() if isinstance(each, torch.fx.Node)}
    for name in saved.conjugated & values.keys():
        # with a clone a trace computes conjugates for operators that do not read them as views
        conjugate = values[name].args[0] if packet(str(values[name].target)) == "aten.clone" else 0
        if isinstance(conjugate, torch.fx.Node):
            values[name] = conjugate
    held = {name: layout.storage.get(value) for name, value in values.items()}
    # autograd calls the results of an operator this, with a number where it has several
    held |= {f"result{at}": name for at, name in enumerate(made)}
    if len(made) == 1:
        held["result"] = made[0]
    found = (held.get(name) for name in saved.names)
    return tuple(dict.fromkeys(name for name in found if name is not None))


_ZEROS = frozenset({"aten.zeros", "aten.new_zeros", "aten.zeros_like"})
_INTO_ZEROS = frozenset(
    f"aten.{name}" for name in ("scatter", "scatter_add", "index_add", "index_put", "put")
)
"""Of gradients, into zeros that the same function has made: of `gather`, `index_select`, `sort`,
`max` and `median` over a dimension, `cummax`, `take`."""

_BINARY_CROSS_ENTROPY = "aten.binary_cross_entropy_with_logits"
_IN_PLACE_THERE = frozenset({"aten.sub", "aten.mul", "aten.div"})


def _without_subclasses(layout: Layout) -> Iterator[str]:
    """Backward nodes that overwrite their first input where no tensor is of a subclass.

    Formulas of PyTorch ask `areAnyTensorSubclassLike`: if so, they take operators that make new
    tensors in place of operators in place (torch/csrc/autograd/FunctionsManual.cpp, ATen/native).
    In a trace and in a rehearsal on fake tensors the answer is yes, in a training step it is no.
    The results are the same bits.
    """
    node_by_name = {node.name: node for node in layout.nodes}
    operator = {
        call.meta.get("seq_nr"): packet(str(call.target))
        for name, call in layout.calls.items()
        if node_by_name[name].phase == "forward"
    }
    for number, names in layout.functions.items():
        is_loss = operator.get(number) == _BINARY_CROSS_ENTROPY
        zeros: set[str] = set()
        made: set[str] = set()
        for name in names:
            node = node_by_name[name]
            op = packet(node.op)
            first = node.inputs[0] if node.inputs else ""
            if (op in _INTO_ZEROS and first in zeros) or (
                is_loss and op in _IN_PLACE_THERE and first in made
            ):
                yield name
            if op in _ZEROS:
                zeros |= set(node.outputs)
            made |= set(node.outputs)
