"""From a schedule to straight-line code: one piece for the forward pass, several for the backward.

Each `Compute` becomes one call of the operator that was traced, each `Free` the end of its names:
fx's code generator deletes a name after its last use, so what is on the device is what the judge
saw. Views are not ops of a schedule: they are derived again from the storage that they point at
whenever a new version of it is read.

The backward pass is cut where a parameter's gradient is made and the parameter is not read any
more, so that gradients can leave as they are made, and whoever gets them may change the parameter
at once (see `scheduler_runtime.execute.autograd`). Gradients that are held to the end of the step
anyhow leave a few at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture import is_random
from graphs.trace import CapturedStep
from scheduler_runtime.execute.piece import Piece, Value, piece_of
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from solver.schedule import Free, Schedule

LEAST_IN_PIECE = 24
"""Values that a piece of the backward pass defines at least, where gradients are not added up."""


@dataclass(frozen=True)
class Program:
    """A schedule as code.

    forward: one piece; backward: pieces in order. sources: placeholder of the traced graph -> the
    value to put into the state. constants: tensors that the model holds in plain attributes.
    outputs: the model's flat outputs: values, placeholders that are returned as they are, or plain
    constants. made_outputs: those of them that the program makes. tangents: position among the
    made outputs -> the value that takes its gradient. tangent_strides: of those values, as the
    backward pass was traced with. differentiable: positions of those that require a gradient in the
    plain model, so that one may arrive that nobody planned for. titles: what people call a source
    ("buffer 'norm.running_mean'"). indifferent: buffers that the step changes and that the backward
    pass is handed without depending on what is in them.
    """

    forward: Piece
    backward: tuple[Piece, ...]
    sources: dict[fx.Node, Value]
    constants: dict[Value, torch.Tensor]
    outputs: tuple[Any, ...]
    made_outputs: tuple[Value, ...]
    tangents: tuple[tuple[int, Value], ...]
    tangent_strides: Mapping[Value, tuple[int, ...]]
    differentiable: frozenset[int]
    titles: Mapping[Value, str]
    indifferent: frozenset[Value]

    @functools.cached_property
    def handed(self) -> tuple[Value, ...]:
        """Tensors that others can reach: what comes in, what the model holds, what goes out."""
        return (*self.sources.values(), *self.constants, *self.made_outputs)

    @functools.cached_property
    def read_backward(self) -> frozenset[Value]:
        """What the backward pass depends on and did not make itself."""
        read = {value for piece in self.backward for value in piece.inputs}
        return frozenset(read - self.indifferent)


def build_program(step: CapturedStep, schedule: Schedule) -> Program:
    """Generate the program of a legal schedule of `step.graph` (what its caller runs left out)."""
    line = _Line(step, schedule)
    line.emit()
    return line.program()


class _Line:
    """The whole step as one straight line of fx nodes, with marks where pieces end."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step = step
        self.schedule = schedule
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Value] = {}
        self.constants: dict[Value, torch.Tensor] = {}
        self._current: dict[fx.Node, Value] = {}  # traced node -> its value in force
        self._of_storage: dict[str, list[fx.Node]] = {}
        self._states: dict[str, Value] = {}
        self._reruns: set[Value] = set()
        self._ends: list[int] = []  # number of line nodes at the end of each piece
        self._finished: list[list[tuple[fx.Node, Value]]] = []
        self._leaving: list[tuple[fx.Node, Value]] = []  # gradients of the piece that is not ended
        self._accumulates = step.graph.meta.gradients == "accumulate"
        self._outputs: tuple[Any, ...] = ()
        self._copies: dict[str, Value] = {}  # name of a clone node -> the copied gradient
        self._position = {node.name: p for p, node in enumerate(step.graph.nodes)}
        self._due = self._when_due()

    def _when_due(self) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
        """Index of an op of the schedule -> the leaves with gradients that leave after it.

        That is when the gradient is there and nothing reads the leaf any more: eager mode, too,
        has read a parameter for the last time when hooks get its gradient, and an optimizer inside
        the backward pass changes it then. Gradients that are inputs leave at the end.
        """
        nodes = self.step.graph.node_by_name
        storage_of = self.step.layout.storage
        last_run: dict[str, int] = {}
        last_read: dict[str, int] = {}
        freed: dict[str, int] = {}
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Free):
                freed[op.tensor] = index
                continue
            last_run[op.node] = index
            last_read |= dict.fromkeys(nodes[op.node].inputs, index)
        first = min((last_run[node.name] for node in self.step.graph.later_nodes), default=0)
        due: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
        for placeholder, gradient in self.step.captured.gradients.items():
            maker = self._maker(placeholder, gradient)
            index = len(self.schedule.ops)
            if maker:
                read = last_read.get(storage_of[placeholder], first)
                index = max(last_run[maker], read, first)
                index = min(index, freed.get(self._held_by(placeholder, gradient), index + 1) - 1)
            due.setdefault(index, []).append((placeholder, gradient))
        return due

    def _held_by(self, placeholder: fx.Node, gradient: fx.Node) -> str:
        """The tensor of the graph that holds a leaf's gradient."""
        layout = self.step.layout
        return layout.gradients.get(placeholder, layout.storage[gradient])

    def _maker(self, placeholder: fx.Node, gradient: fx.Node) -> str:
        """The node after which a gradient is there ("": before any, it is an input).

        One that others copy is handed out after the last of them: while the program still holds it,
        autograd would have to copy it as well.
        """
        layout = self.step.layout
        storage = self._held_by(placeholder, gradient)
        copies = [name for name, of in layout.copies.items() if layout.storage[of] == storage]
        node = self.step.graph.producer.get(storage)
        if node is None:
            return ""
        makers = [node.name, *copies]
        return max(makers, key=self._position.__getitem__)

    def emit(self) -> None:
        layout = self.step.layout
        runs: dict[str, int] = {}
        for name in self.schedule.order:
            runs[name] = runs.get(name, 0) + 1
        for node in self.step.captured.graph.nodes:
            if node.op == "placeholder":
                self._resident(node)
        in_forward = True
        n_forward = len(self.step.graph.forward_nodes)
        started: set[str] = set()
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Free):
                self._forget(op.tensor)
                continue
            if in_forward and len(started) == n_forward:
                self._end_forward()
                in_forward = False
            if op.node in layout.updates:
                self._update(op.node)
            elif op.node in layout.copies:
                self._copy(op.node)
            elif op.node in layout.calls:
                self._call(op.node, again=op.node in started, repeats=runs[op.node] > 1)
            started.add(op.node)
            if index in self._due:
                self._finish(self._due[index])
        if in_forward:
            self._end_forward()
        self._finish(self._due.get(len(self.schedule.ops), []))
        self._end_piece()

    def _resident(self, node: fx.Node) -> None:
        value = self.graph.placeholder(node.name)
        self.sources[node] = value
        self._current[node] = value

    def _constant(self, node: fx.Node) -> Value:
        value = self.graph.placeholder(str(node.target))
        self.constants[value] = getattr(self.step.captured.module, str(node.target))
        return value

    def value(self, node: fx.Node) -> Value:
        """The value in force of a traced node; a view is derived where there is none."""
        known = self._current.get(node)
        if known is not None:
            return known
        if node.op == "get_attr":
            new = self._constant(node)
        elif node.name in self.step.layout.calls:
            raise AssertionError(f"{node.name} is read while it is not there")
        else:
            for argument in node.all_input_nodes:
                self.value(argument)
            new = self.graph.node_copy(node, self.value)
        self._define(node, new)
        return new

    def _define(self, node: fx.Node, value: Value) -> None:
        self._current[node] = value
        storage = self.step.layout.storage.get(node)
        if storage is None:
            storage = self._storage_of_parts(node)
        self._of_storage.setdefault(storage, []).append(node)

    def _storage_of_parts(self, node: fx.Node) -> str:
        """A view with several outputs (split) lives on the storage that it is derived from."""
        stack = list(node.all_input_nodes)
        while stack:
            argument = stack.pop()
            if argument in self.step.layout.storage:
                return self.step.layout.storage[argument]
            stack.extend(argument.all_input_nodes)
        return node.name

    def _forget(self, storage: str) -> None:
        for node in self._of_storage.pop(storage, ()):
            self._current.pop(node, None)

    def _call(self, name: str, *, again: bool, repeats: bool) -> None:
        node = self.step.layout.calls[name]
        for argument in node.all_input_nodes:
            self.value(argument)
        new = self._emit_operator(node, again=again, repeats=repeats)
        if again:
            self._reruns.add(new)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._define(node, new)
            return
        for part in node.users:  # the tuple is dropped once its parts have names
            if part.target is operator.getitem and part not in self._current:
                self._define(part, self.graph.call_function(operator.getitem, (new, part.args[1])))

    def _emit_operator(self, node: fx.Node, *, again: bool, repeats: bool) -> Value:
        if not (repeats and is_random(node)):
            return self.graph.node_copy(node, self.value)
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        target: Any = node.target
        device = _device_of(node)
        if again:
            state = self._states[node.name]
            return self.graph.call_function(
                recompute_random, (target, device, state, *args), kwargs
            )
        both = self.graph.call_function(run_and_keep_state, (target, device, *args), kwargs)
        result = self.graph.call_function(operator.getitem, (both, 0))
        self._states[node.name] = self.graph.call_function(operator.getitem, (both, 1))
        return result

    def _update(self, name: str) -> None:
        placeholder, new_value = self.step.layout.updates[name]
        self.graph.call_function(
            torch.ops.aten.copy_.default, (self.value(placeholder), self.value(new_value))
        )

    def _copy(self, name: str) -> None:
        gradient = self.step.layout.copies[name]
        self._copies[name] = self.graph.call_function(
            torch.ops.aten.clone.default,
            (self.value(gradient),),
            {"memory_format": torch.contiguous_format},
        )

    def _gradient(self, placeholder: fx.Node, gradient: fx.Node) -> Value:
        """The value of a leaf's gradient: its copy, where it was copied."""
        copied = self._copies.get(self.step.layout.gradients.get(placeholder, ""))
        return self.value(gradient) if copied is None else copied

    def _end_forward(self) -> None:
        self._outputs = tuple(
            self.value(item) if isinstance(item, fx.Node) and item.op != "placeholder" else item
            for item in self.step.captured.outputs
        )
        self._end_piece()

    def _finish(self, gradients: list[tuple[fx.Node, fx.Node]]) -> None:
        """These gradients are there. They leave now, or with others that come soon after, where
        they are held to the end of the step anyhow: each piece costs the host as much as some
        operators do."""
        self._leaving += [(node, self._gradient(node, gradient)) for node, gradient in gradients]
        started = self._ends[-1] if self._ends else 0
        if self._accumulates or len(self.graph.nodes) - started >= LEAST_IN_PIECE:
            self._end_piece()

    def _end_piece(self) -> None:
        self._ends.append(len(self.graph.nodes))
        self._finished.append(self._leaving)
        self._leaving = []

    def program(self) -> Program:
        """Cut the line into pieces and generate the code of each."""
        line = list(self.graph.nodes)
        starts = [0, *self._ends[:-1]]
        pieces = [line[a:b] for a, b in zip(starts, self._ends, strict=True)]
        made = tuple(v for v in self._outputs if isinstance(v, fx.Node) and v.graph is self.graph)
        wanted = [{value for _, value in finished} for finished in self._finished]
        wanted[0].update(made)
        built: list[Piece] = []
        read_later: set[Value] = set()
        resident = {*self.constants}
        for node, value in self.sources.items():
            if self.step.captured.sources[node].kind != "tangent":
                resident.add(value)
        for index in range(len(pieces) - 1, -1, -1):
            body = [node for node in pieces[index] if node.op != "placeholder"]
            piece = piece_of(
                body, read_later, wanted[index], resident, tuple(self._finished[index])
            )
            built.append(piece)
            read_later = (read_later | wanted[index] | set(piece.inputs)) - set(body)
        built.reverse()
        return Program(
            forward=built[0],
            backward=tuple(p for p in built[1:] if p.results or p.gradients),
            sources=self.sources,
            constants=self.constants,
            outputs=self._outputs,
            made_outputs=made,
            tangents=self._tangents(made),
            tangent_strides={
                self.sources[node]: tuple(node.meta["val"].stride())
                for node in self.step.captured.tangents.values()
            },
            differentiable=frozenset(
                made.index(self._outputs[position])
                for position in self.step.captured.differentiable
                if self._outputs[position] in made
            ),
            titles=dict.fromkeys(self.constants, "a tensor that the model holds")
            | {
                value: self.step.captured.sources[node].title
                for node, value in self.sources.items()
            },
            indifferent=self._indifferent({node for piece in pieces[1:] for node in piece}),
        )

    def _indifferent(self, later: set[Value]) -> frozenset[Value]:
        """Buffers that the step changes and that only ops running again read.

        Of the readers of such a buffer, extraction lets those alone run again whose results do not
        depend on it (batch norm in training), so the next forward pass may change it before this
        backward pass.
        """
        changed = {self.sources[placeholder] for placeholder in self.step.captured.mutations}
        return frozenset(
            value for value in changed if later.intersection(value.users) <= self._reruns
        )

    def _tangents(self, made: tuple[Value, ...]) -> tuple[tuple[int, Value], ...]:
        return tuple(
            (made.index(self._outputs[position]), self.sources[placeholder])
            for position, placeholder in self.step.captured.tangents.items()
        )


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    return (value if isinstance(value, torch.Tensor) else value[0]).device


def generated_code(program: Program) -> Iterator[str]:
    """The Python source of each piece, forward first; for people who want to read it."""
    yield program.forward.module.code
    for piece in program.backward:
        yield piece.module.code
