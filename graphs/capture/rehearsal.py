"""Finds out what eager mode overwrites, frees early and holds, which no graph shows.

A traced backward function is a list of functional operators. Its C++ code may work in place
(`sigmoid(x).sub_(target).mul_(grad)`), and frees temporaries at the end of an expression. No graph
shows that. So the step runs once in eager mode on fake tensors, and the operators that each
backward function calls are compared with its traced operators.

If eager mode writes into a part of a tensor, a trace has two operators: one computes the part, and
a scatter makes a new tensor that contains it. In eager mode both use the storage of that tensor.

Autograd may also save more than a backward function reads (`fft_r2c` saves its input for the number
of columns), so the rehearsal records what each function has saved.

What the forward pass holds is in `graphs.capture.held_in_forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import torch

from graphs.capture.captured_step import Capture
from graphs.capture.eager_calls import EagerCall, EagerCalls, matching_pairs, operator_name
from graphs.capture.extraction import Layout
from graphs.capture.held_in_forward import DeadCall, DeadResult
from graphs.capture.leaves_in_forward import DeadGradient
from graphs.model_calls import autograd_functions, named_arguments, strided_like

_SCATTERS = frozenset(
    f"aten.{name}_scatter" for name in ("slice", "select", "diagonal", "as_strided")
)
"""The second operator in a trace if eager mode writes into a view."""

_FUNCTIONS_AHEAD = 8
"""How many eager functions to look ahead for the next traced one: some have no traced operators."""


@dataclass(frozen=True)
class Rehearsed:
    """What a run in eager mode has shown about the nodes of a captured step.

    in_place: backward nodes that overwrite their first input in eager mode.
    dropped: tensor that a backward function makes -> the node of that function after which it is
        freed, if that is not the function's last node.
    saved: node -> tensors that stay alive until it has run, whether or not it reads them. For a
        backward node, these are saved by autograd for its function, or for a later function without
        nodes; for a forward node, variables of `forward` hold them.
    in_calls: forward node -> tensors that variables of `forward` hold until it has run if autograd
        saves nothing; None: not known.
    dead: results of dead code, which the trace leaves out; `saved` and `in_calls` name them, too.
    dead_calls: operator calls of dead code.
    dead_gradients: what the backward pass makes for leaves of `forward`; `saved` names them, too.
    unfilled_caches: paths of the modules of transformers whose config asks for a cache
        (`caching_configs`), if the step fills none.
    """

    in_place: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_calls: Mapping[str, tuple[str, ...]] | None = None
    dead: tuple[DeadResult, ...] = ()
    dead_calls: tuple[DeadCall, ...] = ()
    dead_gradients: tuple[DeadGradient, ...] = ()
    unfilled_caches: tuple[str, ...] = ()


@dataclass(frozen=True)
class _SavedTensors:
    """The tensors that an autograd function has saved.

    function: name of the function ("MulBackward0").
    names: names of the operator's arguments and results that are saved.
    conjugated: those of the names whose tensors are lazy conjugates. They share the original's
        storage, while a trace computes the conjugate.
    """

    function: str
    names: tuple[str, ...]
    conjugated: frozenset[str] = frozenset()


@contextlib.contextmanager
def backward_seen() -> Iterator[None]:
    """While inside, a backward pass runs as after the `autocast` block, and EagerCalls sees it."""
    with torch._C._DisableAutocast(), torch.autograd.set_multithreading_enabled(False):
        yield


def gradients_of(outputs: Sequence[torch.Tensor], captured: Capture) -> list[torch.Tensor]:
    """Gradients of ones, with the strides that decide which operators the backward pass runs."""
    tangents = [captured.tangents[index].meta["val"] for index in sorted(captured.tangents)]
    if [each.shape for each in tangents] == [item.shape for item in outputs]:
        return [strided_like(each).fill_(1.0) for each in tangents]
    return [torch.ones_like(item) for item in outputs]


def saved_by_functions(outputs: Iterable[torch.Tensor]) -> dict[int, _SavedTensors]:
    """Find what autograd has saved for the backward pass from these outputs.

    Returns sequence number of an autograd function -> what it has saved. Call this before the
    backward pass, which frees the saved tensors.
    """
    found: dict[int, _SavedTensors] = {}
    for node in autograd_functions(outputs):
        tensors = _saved_by(node)
        conjugated = frozenset(name for name, each in tensors.items() if each.is_conj())
        found[node._sequence_nr()] = _SavedTensors(node.name(), tuple(tensors), conjugated)
    return found


def saved_tensors(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """All tensors that autograd has saved for the backward pass from these outputs, those of an
    `autograd.Function` too. Call this before the backward pass."""
    for node in autograd_functions(outputs):
        yield from _saved_by(node).values()
        own = getattr(node, "saved_tensors", ())
        yield from (each for each in own if isinstance(each, torch.Tensor))


def _saved_by(node: Any) -> dict[str, torch.Tensor]:
    """What an autograd function of PyTorch has saved, by name ("self", "result")."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    values = {name.removeprefix("_saved_"): getattr(node, name) for name in names}
    return {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}


def compare_backward(
    layout: Layout, eager: EagerCalls, saved: Mapping[int, _SavedTensors]
) -> Rehearsed:
    """Compare the traced backward functions with those that ran in eager mode.

    Nothing is said about functions that do not run the same operators in both.

    layout: the captured step.
    eager: the calls of the backward pass in eager mode.
    saved: what `saved_by_functions` returned.
    """
    in_place: list[str] = []
    dropped: dict[str, str] = {}
    outputs = {node.name: node.outputs for node in layout.nodes}
    number_of: dict[int, int] = {}  # sequence number in eager mode -> in the trace
    for number, pairs in matched_functions(layout, eager):
        members, function = [name for name, _ in pairs], [call for _, call in pairs]
        assert function[0].function is not None
        number_of[function[0].function] = number
        in_place += [name for name in layout.functions[number] if name not in members]
        for name, call in zip(members, function, strict=True):
            if call.overwrites:
                in_place.append(name)
            for out, storage in zip(outputs[name], call.storages, strict=False):
                freed = eager.freed.get(storage, len(eager.calls))
                nodes_while_alive = [
                    m for m, c in zip(members, function, strict=True) if c.index < freed
                ]
                if nodes_while_alive[-1] != members[-1]:
                    dropped[out] = nodes_while_alive[-1]
    in_place += _in_place_without_subclasses(layout)
    return Rehearsed(
        tuple(dict.fromkeys(in_place)), dropped, _saved_but_unread(layout, number_of, saved)
    )


def matched_functions(
    layout: Layout, eager: EagerCalls
) -> Iterator[tuple[int, Sequence[tuple[str, EagerCall]]]]:
    """The traced backward functions that ran in eager mode: for each its sequence number in the
    trace, and its nodes, except scatters, with their calls."""
    op = {node.name: operator_name(node.op) for node in layout.nodes}
    in_functions = (call for call in eager.calls if call.function is not None)
    functions = [list(group) for _, group in groupby(in_functions, lambda call: call.function)]
    for (number, traced), calls in matching_pairs(
        [*layout.functions.items()],
        functions,
        lambda one, other: _matching_calls(one[1], other, op) is not None,
        n_look_ahead=_FUNCTIONS_AHEAD,
    ):
        function = _matching_calls(traced, calls, op)
        assert function is not None  # they match
        members = _without_scatters(traced, op, len(function))
        yield number, list(zip(members, function, strict=True))


def _matching_calls(
    members: Sequence[str], function: Sequence[EagerCall], op: Mapping[str, str]
) -> Sequence[EagerCall] | None:
    """The eager calls that match the nodes of a traced function; None if they do not match.

    A scatter among the nodes matches if the call before it overwrites its argument.

    After a function has returned, autograd's engine adds its gradients to those that exist already.
    In eager mode these sums look like the function's last calls; in the trace they belong to no
    function. So trailing `add` calls may be left out.

    members: names of the traced function's nodes.
    function: the calls of one function in eager mode.
    op: node name -> operator.
    """
    n_sums = sum(1 for _ in takewhile(lambda call: call.name == "aten.add", reversed(function)))
    for n_calls in range(len(function), len(function) - n_sums - 1, -1):
        # Compare with fewer and fewer trailing sums counted as the function's own calls.
        kept = _without_scatters(members, op, n_calls)
        own_calls = function[:n_calls]
        if [op[name] for name in kept] != [call.name for call in own_calls]:
            continue
        calls, overwrites, is_same = iter(own_calls), False, True
        for name in members:
            if name in kept:
                overwrites = next(calls).overwrites
            else:
                is_same &= overwrites
        if is_same:
            return own_calls
    return None


def _without_scatters(members: Sequence[str], op: Mapping[str, str], n_calls: int) -> Sequence[str]:
    """The nodes that eager mode calls: all if it makes `n_calls` calls, else all but scatters."""
    if len(members) == n_calls:
        return members
    return [name for name in members if op[name] not in _SCATTERS]


def _saved_but_unread(
    layout: Layout, number_of: Mapping[int, int], saved: Mapping[int, _SavedTensors]
) -> dict[str, tuple[str, ...]]:
    """Backward node -> tensors that autograd has saved for its function but that it does not read.

    Tensors saved for a function without nodes are given to the last node that runs before it.

    number_of: sequence number of a matched function in eager mode -> in the trace. For any other
        function, the difference of both numbers is that of the next higher matched function. (The
        engine runs functions from the highest number to the lowest.)
    saved: sequence number of a function in eager mode -> what it has saved.
    """
    node_by_name = {node.name: node for node in layout.nodes}
    # Forward operators by sequence number: a differentiable one, and those that ran between the
    # previous differentiable one and it.
    forward: dict[int, list[torch.fx.Node]] = {}
    for name, call in layout.calls.items():
        if node_by_name[name].phase != "backward" and "seq_nr" in call.meta:
            forward.setdefault(call.meta["seq_nr"], []).append(call)
    unread_after: dict[str, tuple[str, ...]] = {}
    offset: int | None = None
    for number in sorted(saved, reverse=True):
        if number in number_of:
            offset = number_of[number] - number
        if offset is None or not saved[number].names:
            continue
        traced_number = number + offset
        calls = [
            call
            for call in forward.get(traced_number, [])
            if saved[number]
            .function.lower()
            .startswith(
                operator_name(str(call.target)).removeprefix("aten.").replace("_", "") + "backward"
            )
        ]
        arguments: tuple[str, ...] = ()
        if len(calls) == 1:
            results = node_by_name[calls[0].name].outputs
            arguments = _saved_tensors(layout, calls[0], results, saved[number])
        function = layout.functions.get(traced_number, ())
        read = {name for member in function for name in node_by_name[member].inputs}
        if unread := [name for name in arguments if name not in read]:
            before = [each for each in layout.functions if each >= traced_number]
            last = layout.functions[before[-1]][-1]
            unread_after[last] = tuple(dict.fromkeys((*unread_after.get(last, ()), *unread)))
    return unread_after


def _saved_tensors(
    layout: Layout, call: torch.fx.Node, results: Sequence[str], saved: _SavedTensors
) -> tuple[str, ...]:
    """The tensors of the graph that autograd has saved for the backward of an operator.

    call: the operator's fx node.
    results: the tensors that it returns.
    """
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return ()
    arguments = named_arguments(call.target, call.args, call.kwargs)
    if call.name in layout.in_place:  # autograd saves a copy, which the trace reads
        arguments.pop(schema.arguments[0].name, None)
    values = {name: each for name, each in arguments.items() if isinstance(each, torch.fx.Node)}
    for name in saved.conjugated & values.keys():
        # A trace computes a conjugate, by a clone, for operators that cannot read it as a view.
        conjugate = (
            values[name].args[0] if operator_name(str(values[name].target)) == "aten.clone" else 0
        )
        if isinstance(conjugate, torch.fx.Node):
            values[name] = conjugate
    tensor_of = {name: layout.storage.get(value) for name, value in values.items()}
    # Autograd's names of an operator's results: "result", or "result0", "result1", ...
    tensor_of |= {f"result{at}": name for at, name in enumerate(results)}
    if len(results) == 1:
        tensor_of["result"] = results[0]
    found = (tensor_of.get(name) for name in saved.names)
    return tuple(dict.fromkeys(name for name in found if name is not None))


_ZEROS = frozenset({"aten.zeros", "aten.new_zeros", "aten.zeros_like"})
_INTO_ZEROS = frozenset(
    f"aten.{name}" for name in ("scatter", "scatter_add", "index_add", "index_put", "put")
)
"""Operators by which the backward functions of `gather`, `index_select`, `sort`, `max` and `median`
over a dimension, `cummax` and `take` write gradients into zeros that they have made."""

_BINARY_CROSS_ENTROPY = "aten.binary_cross_entropy_with_logits"
_LOSS_BACKWARD_IN_PLACE = frozenset({"aten.sub", "aten.mul", "aten.div"})


def _in_place_without_subclasses(layout: Layout) -> Iterator[str]:
    """Backward nodes that overwrite their first input only if no tensor is of a subclass.

    Some backward formulas of PyTorch ask `areAnyTensorSubclassLike`, and if so use out-of-place
    operators instead of in-place ones (torch/csrc/autograd/FunctionsManual.cpp, ATen/native). In a
    trace and in a rehearsal on fake tensors the answer is yes; in a training step it is no. The
    results are bitwise identical.
    """
    node_by_name = {node.name: node for node in layout.nodes}
    operator = {
        call.meta.get("seq_nr"): operator_name(str(call.target))
        for name, call in layout.calls.items()
        if node_by_name[name].phase == "forward"
    }
    for number, names in layout.functions.items():
        is_loss = operator.get(number) == _BINARY_CROSS_ENTROPY
        zeros: set[str] = set()
        own_results: set[str] = set()
        for name in names:
            node = node_by_name[name]
            op = operator_name(node.op)
            first = node.inputs[0] if node.inputs else ""
            # Such formulas write into zeros, or compute the gradient of this loss step by step.
            if (op in _INTO_ZEROS and first in zeros) or (
                is_loss and op in _LOSS_BACKWARD_IN_PLACE and first in own_results
            ):
                yield name
            if op in _ZEROS:
                zeros |= set(node.outputs)
            own_results |= set(node.outputs)
