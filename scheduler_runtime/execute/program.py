"""From a schedule to straight-line code: one piece for the forward pass, several for the backward.

Each `Compute` becomes one call of the traced operator, each `Free` the end of its names: fx's code
generator deletes a name after its last use, so live memory is what the simulator counted. Views are
not ops of a schedule: they are derived again from their storage whenever a recomputed version of it
is read.

The backward pass is cut into pieces where a parameter's gradient is complete and the parameter is
not read any more, so that gradients leave as they are computed, and whoever receives them may
change the parameter at once (see `scheduler_runtime.execute.autograd`). Gradients that are held to
the end of the step anyway leave a few at a time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.capture import OpaqueForward, Overwrite, is_random
from graphs.trace import CapturedStep
from graphs.training_step import accumulation
from scheduler_runtime.execute.copies import Pools
from scheduler_runtime.execute.copy_calls import CopyCalls
from scheduler_runtime.execute.piece import Piece, Value, piece_of
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from solver.schedule import Compute, CopyLayout, Free, Places, Schedule, copy_layout
from solver.sizes_deadlines_progress import format_both

LEAST_IN_PIECE = 24
"""Minimum of values that a piece of the backward pass defines, unless gradients accumulate."""


@dataclass(frozen=True)
class Program:
    """A schedule as code.

    forward: one piece.
    backward: pieces in order.
    sources: placeholder of the traced graph -> the value that it is in the program.
    constants: tensors that the model holds in plain attributes.
    outputs: the model's flat outputs: values, placeholders that are returned unchanged, or plain
        constants.
    made_outputs: those outputs that the program computes.
    tangents: index in made_outputs -> the value that receives its gradient.
    tangent_strides: strides of those gradients that the backward pass was traced with.
    differentiable: indices in made_outputs of those that require a gradient in the plain model, so
        that one may arrive that is not planned for.
    titles: of sources, for messages ("buffer 'norm.running_mean'").
    reachable: tensors that code outside can reach: inputs, constants, outputs.
    read_backward: what the backward pass depends on and does not compute itself.
    copies: the value that is the step's `Copies` (None: the schedule has none).
    copy_layout: where they lie. pools: where the memory comes from.
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
    reachable: tuple[Value, ...]
    read_backward: frozenset[Value]
    copies: Value | None = None
    copy_layout: CopyLayout | None = None
    pools: Pools | None = None


def build_program(
    step: CapturedStep,
    schedule: Schedule,
    *,
    places: Places | None = None,
    pools: Pools | None = None,
) -> Program:
    """Generate the program of a legal schedule of the module's part of `step.graph`.

    places: what the schedule copies to (None: as much as it takes).
    pools: what it copies to, shared with other programs (None: some of its own, without a disk).

    Raises ValueError for copies that cannot be made.
    """
    if not schedule.has_copies:
        line = _Line(step, schedule, None)
        line.emit()
        return line.program(None)
    part = step.graph.module_part()
    layout = copy_layout(part, schedule, places)
    if excess := layout.excess(places):
        raise ValueError(f"{excess}; plan again")
    pools = pools or Pools()
    if layout.disk_bytes and pools.directory is None:
        raise ValueError(
            f"the plan copies {format_both(layout.disk_bytes)} to a disk: name a directory there, "
            'apply(model, plan, disk_directory="/scratch")'
        )
    line = _Line(step, schedule, layout)
    line.emit()
    return line.program(pools)


class _Line:
    """The whole step as one straight line of fx nodes, with marks where pieces end.

    "Traced" nodes are those of the captured graph; values are nodes of the line.
    """

    def __init__(
        self, step: CapturedStep, schedule: Schedule, copy_layout: CopyLayout | None
    ) -> None:
        self.step = step
        self.layout = step.layout
        self.copy_layout = copy_layout
        self.schedule = schedule
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Value] = {}
        self.constants: dict[Value, torch.Tensor] = {}
        self._current: dict[fx.Node, Value] = {}  # traced node -> its live value
        self._of_storage: dict[str, list[fx.Node]] = {}  # storage -> traced nodes with a live value
        self._states: dict[str, Value] = {}  # random operator -> its generator's state
        self._recomputed: set[Value] = set()
        self._ends: list[int] = []  # number of line nodes at the end of each piece
        self._finished: list[list[tuple[fx.Node, Value]]] = []  # gradients of each piece
        self._leaving: list[tuple[fx.Node, Value]] = []  # gradients of the current piece
        self._outputs: tuple[Any, ...] = ()
        made = (item for item in step.captured.outputs if isinstance(item, fx.Node))
        self._leaves_program = {*made, *step.captured.gradients.values()}
        self._copying: CopyCalls | None = None
        self._copies: dict[str, Value] = {}  # name of a clone node -> the copied gradient

    def emit(self) -> None:
        graph, layout = self.step.graph, self.layout
        n_runs = Counter(self.schedule.order)
        due = self._gradients_due()
        for node in self.step.captured.graph.nodes:
            if node.op == "placeholder":
                self.sources[node] = self._current[node] = self.graph.placeholder(node.name)
        if self.copy_layout is not None:
            self._copying = CopyCalls(
                graph,
                self.copy_layout,
                self.graph,
                values=self._made_on,
                define=self._define,
            )
        n_forward, in_forward = len(graph.forward_nodes), True
        started: set[str] = set()
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Free):
                self._free(op.tensor)
                continue
            if not isinstance(op, Compute):
                assert self._copying is not None
                self._copying.op(index, op)
                continue
            if in_forward and len(started) == n_forward:
                self._end_forward()
                in_forward = False
            node = graph.node_by_name[op.node]
            replaced = {} if self._copying is None else self._copying.before(node)
            if op.node in layout.updates:
                target, new_value = layout.updates[op.node]
                self.graph.call_function(
                    torch.ops.aten.copy_.default, (self.value(target), self.value(new_value))
                )
            elif op.node in layout.copies:
                self._copies[op.node] = self.graph.call_function(
                    torch.ops.aten.clone.default,
                    (self.value(layout.copies[op.node]),),
                    {"memory_format": torch.contiguous_format},
                )
            elif op.node in layout.calls:
                self._call(op.node, again=op.node in started, repeats=n_runs[op.node] > 1)
            started.add(op.node)
            if self._copying is not None:
                self._copying.after(node, replaced)
            if index in due:
                self._finish(due[index])
        if in_forward:
            self._end_forward()
        self._finish(due.get(len(self.schedule.ops), []))
        self._end_piece()

    def _free(self, tensor: str) -> None:
        if self._copying is not None:
            self._copying.free(tensor)
        for node in self._of_storage.pop(tensor, ()):
            self._current.pop(node, None)

    def _made_on(self, tensor: str) -> dict[fx.Node, Value]:
        """The live values of a tensor that operators have made: views of them are derived again."""
        values = {n: self._current[n] for n in self._of_storage.get(tensor, ())}
        return {node: value for node, value in values.items() if self._is_made(node)}

    def _is_made(self, node: fx.Node) -> bool:
        call = node.args[0] if node.target is operator.getitem else node
        return isinstance(call, fx.Node) and call.name in self.layout.calls

    def _gradients_due(self) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
        """Index of an op of the schedule -> the leaves, with gradients, that leave after it.

        That is when the gradient is complete and nothing reads the leaf any more: in eager mode,
        too, a parameter has been read for the last time when hooks receive its gradient, and an
        optimizer inside the backward pass changes it then. Gradients that are inputs leave at the
        end.
        """
        graph, layout = self.step.graph, self.layout
        last_run: dict[str, int] = {}
        last_read: dict[str, int] = {}
        freed: dict[str, int] = {}
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Free):
                freed[op.tensor] = index
            if not isinstance(op, Compute):
                continue
            last_run[op.node] = index
            last_read |= dict.fromkeys(graph.node_by_name[op.node].inputs, index)
        backward = min((last_run[node.name] for node in graph.later_nodes), default=0)
        position = {node.name: index for index, node in enumerate(graph.nodes)}
        due: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
        for leaf, gradient in self.step.captured.gradients.items():
            storage = layout.gradients.get(leaf, layout.storage[gradient])
            producer = graph.producer.get(storage)
            index = len(self.schedule.ops)
            if producer is not None:
                # One that is copied for other leaves leaves after the last copy: while the program
                # holds it, autograd would copy it as well.
                copies = [n for n, of in layout.copies.items() if layout.storage[of] == storage]
                last = max((producer.name, *copies), key=position.__getitem__)
                read = last_read.get(layout.storage[leaf], backward)
                index = max(last_run[last], read, backward)
                index = min(index, freed.get(storage, index + 1) - 1)
            due.setdefault(index, []).append((leaf, gradient))
        return due

    def value(self, node: fx.Node) -> Value:
        """The live value of a traced node; a view without one is derived again."""
        known = self._current.get(node)
        if known is not None:
            return known
        if node.op == "get_attr":
            new = self.graph.placeholder(str(node.target))
            self.constants[new] = getattr(self.step.captured.module, str(node.target))
        elif node.name in self.layout.calls:
            raise AssertionError(f"{node.name} is read while it is not live")
        else:
            for argument in node.all_input_nodes:  # before the copy: it may append nodes itself
                self.value(argument)
            if node.target is torch.ops.aten.detach.default and node not in self._leaves_program:
                new = self.value(node.all_input_nodes[0])  # autograd does not see the program
            else:
                new = self.graph.node_copy(node, self.value)
        self._define(node, new)
        return new

    def _define(self, node: fx.Node, value: Value) -> None:
        self._current[node] = value
        stack, storage = [node], node.name
        while stack:  # a view with several outputs (split) is in the storage that it derives from
            traced = stack.pop()
            if traced in self.layout.storage:
                storage = self.layout.storage[traced]
                break
            stack.extend(traced.all_input_nodes)
        self._of_storage.setdefault(storage, []).append(node)

    def _call(self, name: str, *, again: bool, repeats: bool) -> None:
        """Run an operator. again: it is a recomputation; repeats: there is one in the schedule."""
        node = self.layout.calls[name]
        for argument in node.all_input_nodes:
            self.value(argument)
        if repeats and is_random(node):
            new = self._call_random(node, again=again)
        elif (overwrite := self.layout.overwriting.get(name)) is not None:
            new = self._call_over(node, overwrite)
        else:
            new = self.graph.node_copy(node, self.value)
        if again:
            self._recomputed.add(new)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._define(node, new)
            return
        for part in node.users:  # the tuple dies once its parts have names
            if part.target is operator.getitem and part not in self._current:
                self._define(part, self.graph.call_function(operator.getitem, (new, part.args[1])))

    def _call_over(self, node: fx.Node, overwrite: Overwrite) -> Value:
        """Run an operator that writes its result over one of its arguments."""
        args = fx.map_arg(node.args, self.value)
        kwargs = dict(fx.map_arg(node.kwargs, self.value))
        if overwrite.keyword is not None:
            kwargs[overwrite.keyword] = self.value(overwrite.argument)
        return self.graph.call_function(overwrite.target, args, kwargs)

    def _call_random(self, node: fx.Node, *, again: bool) -> Value:
        target: Any = node.target
        result = node.meta["val"]
        device = (result if isinstance(result, torch.Tensor) else result[0]).device
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        first: Callable[..., Any] = run_and_keep_state
        repeated: Callable[..., Any] = recompute_random
        what: tuple[Any, ...] = (target, device)
        if isinstance(target, OpaqueForward):  # it may draw from other generators, too
            first, repeated, what = target.keep_state, target.run_again, ()
        if again:
            state = self._states[node.name]
            return self.graph.call_function(repeated, (*what, state, *args), kwargs)
        both = self.graph.call_function(first, (*what, *args), kwargs)
        new = self.graph.call_function(operator.getitem, (both, 0))
        self._states[node.name] = self.graph.call_function(operator.getitem, (both, 1))
        return new

    def _end_forward(self) -> None:
        self._outputs = tuple(
            self.value(item) if isinstance(item, fx.Node) and item.op != "placeholder" else item
            for item in self.step.captured.outputs
        )
        self._end_piece()

    def _finish(self, gradients: list[tuple[fx.Node, fx.Node]]) -> None:
        """These gradients are complete; they leave now, or with the next ones.

        A piece costs the host as much as several operators. Where gradients accumulate each is
        added up and freed at once; where not, they are held to the end of the step anyway, so a few
        share a piece.
        """
        for leaf, gradient in gradients:
            copied = self._copies.get(self.layout.gradients.get(leaf, ""))
            self._leaving.append((leaf, self.value(gradient) if copied is None else copied))
        accumulates = accumulation(self.step.graph.meta.gradients).of_module
        started = self._ends[-1] if self._ends else 0
        if accumulates or len(self.graph.nodes) - started >= LEAST_IN_PIECE:
            self._end_piece()

    def _end_piece(self) -> None:
        self._ends.append(len(self.graph.nodes))
        self._finished.append(self._leaving)
        self._leaving = []

    def program(self, pools: Pools | None) -> Program:
        """Cut the line into pieces and generate the code of each."""
        captured = self.step.captured
        line = list(self.graph.nodes)
        starts = [0, *self._ends[:-1]]
        bodies = [line[a:b] for a, b in zip(starts, self._ends, strict=True)]
        made = tuple(v for v in self._outputs if isinstance(v, fx.Node) and v.graph is self.graph)
        wanted = [{value for _, value in finished} for finished in self._finished]
        wanted[0].update(made)
        copies = None if self._copying is None else self._copying.copies
        resident = {
            *self.constants,
            *(() if copies is None else (copies,)),
            *(v for node, v in self.sources.items() if captured.sources[node].kind != "tangent"),
        }
        pieces: list[Piece] = []
        read_later: set[Value] = set()
        for index in range(len(bodies) - 1, -1, -1):
            body = [node for node in bodies[index] if node.op != "placeholder"]
            gradients = tuple(self._finished[index])
            piece = piece_of(body, read_later, wanted[index], resident, gradients)
            pieces.insert(0, piece)
            read_later = (read_later | wanted[index] | set(piece.inputs)) - set(body)
        # Extraction lets those readers of a changed buffer alone be recomputed whose results do not
        # depend on its content (batch norm in training), so if no others read it later, the next
        # forward pass may change it before this backward pass.
        changed = {self.sources[placeholder] for placeholder in captured.mutations}
        later = {node for body in bodies[1:] for node in body}
        indifferent = {v for v in changed if later.intersection(v.users) <= self._recomputed}
        backward = tuple(p for p in pieces[1:] if p.results or p.gradients)
        read_backward = {value for piece in backward for value in piece.inputs}
        return Program(
            forward=pieces[0],
            backward=backward,
            sources=self.sources,
            constants=self.constants,
            outputs=self._outputs,
            made_outputs=made,
            tangents=tuple(
                (made.index(self._outputs[index]), self.sources[placeholder])
                for index, placeholder in captured.tangents.items()
            ),
            tangent_strides={
                self.sources[node]: tuple(node.meta["val"].stride())
                for node in captured.tangents.values()
            },
            differentiable=frozenset(
                made.index(self._outputs[index])
                for index in captured.differentiable
                if self._outputs[index] in made
            ),
            titles=dict.fromkeys(self.constants, "a tensor that the model holds")
            | {value: captured.sources[node].title for node, value in self.sources.items()},
            reachable=(*self.sources.values(), *self.constants, *made),
            read_backward=frozenset(read_backward - indifferent),
            copies=copies,
            copy_layout=self.copy_layout,
            pools=pools,
        )
