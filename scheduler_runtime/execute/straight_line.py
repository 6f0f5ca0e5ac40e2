"""Turn a schedule into one straight line of fx nodes, before it is cut into pieces."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphs.capture import GradientCopy, OpaqueForward, Overwrite, Write, is_random
from graphs.costs import is_collective
from graphs.host_state import LOAD
from graphs.trace import CapturedStep
from graphs.training_step import accumulation
from scheduler_runtime.execute.buffers_in_place import buffers_in_place
from scheduler_runtime.execute.copy_calls import CopyCalls
from scheduler_runtime.execute.host_values import load
from scheduler_runtime.execute.piece import Value
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from solver.schedule import Compute, CopyLayout, Free, Schedule

LEAST_IN_PIECE = 24
"""Least number of values that a piece of the backward pass defines, unless gradients accumulate."""


class StraightLine:
    """The whole step as one straight line of fx nodes, with marks where pieces end.

    "Traced" nodes are nodes of the captured graph; "values" are nodes of the line. After a
    recomputation, a traced node has a new value.

    schedule: the ops of the module.
    n_before_loss: how many of them come before the caller computes its loss.
    copy_layout: where the copies are; None: there are none.
    """

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        n_before_loss: int,
        copy_layout: CopyLayout | None,
    ) -> None:
        self.step = step
        self.layout = step.layout
        self.copy_layout = copy_layout
        self.schedule = schedule
        self._n_before_loss = n_before_loss
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Value] = {}
        self.constants: dict[Value, torch.Tensor] = {}
        self._live_values: dict[fx.Node, Value] = {}  # traced node -> its live value
        # storage -> traced nodes with a live value
        self._live_on_storage: dict[str, list[fx.Node]] = {}
        self._states: dict[str, Value] = {}  # random operator -> its generator's state
        self.in_place = buffers_in_place(step)
        self._in_place_results = {new for each in self.in_place.values() for new in each.buffers}
        self.recomputed: set[Value] = set()
        self.piece_ends: list[int] = []  # number of line nodes at the end of each piece
        self.piece_gradients: list[list[tuple[fx.Node, Value]]] = []  # gradients of each piece
        self._current_gradients: list[tuple[fx.Node, Value]] = []  # gradients of the current piece
        self.outputs: tuple[Any, ...] = ()
        computed = (item for item in step.captured.outputs if isinstance(item, fx.Node))
        self._returned_nodes = {*computed, *step.captured.gradients.values()}
        self.copy_calls: CopyCalls | None = None
        self._loaded_parameters: set[fx.Node] = set()  # parameters whose values come from the host
        self._cloned_gradients: dict[str, Value] = {}  # name of a clone node -> the copied gradient
        self._emit()

    def _emit(self) -> None:
        """Go through the schedule, and append a call to the line for each op."""
        graph, layout = self.step.graph, self.layout
        n_runs = Counter(self.schedule.order)
        due = gradients_due(self.step, self.schedule)
        for node in self.step.captured.graph.nodes:
            if node.op == "placeholder":
                self.sources[node] = self._live_values[node] = self.graph.placeholder(node.name)
        if self.copy_layout is not None:
            self.copy_calls = CopyCalls(
                graph,
                self.copy_layout,
                self.graph,
                values=self._computed_values_on,
                define=self._define,
            )
        n_forward, in_forward = len(graph.forward_nodes), True
        started: set[str] = set()
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Free):
                self._free(op.tensor)
                continue
            # Once all forward nodes have run, further ones are recomputations of the backward pass.
            # What the plan fetches after the loss would take the memory that the loss needs.
            is_later = isinstance(op, Compute) or index >= self._n_before_loss
            if in_forward and is_later and len(started) == n_forward:
                self._end_forward()
                in_forward = False
            if not isinstance(op, Compute):
                assert self.copy_calls is not None
                self.copy_calls.append(index, op)
                continue
            node = graph.node_by_name[op.node]
            replaced = {} if self.copy_calls is None else self.copy_calls.before_call(node)
            if op.node in layout.updates:
                self._write(layout.updates[op.node])
            elif op.node in layout.copies:
                self._cloned_gradients[op.node] = self._cloned(layout.copies[op.node])
            elif node.op == LOAD:
                self._load(node.outputs[0])
            elif op.node in layout.calls:
                self._call(
                    op.node, is_recomputation=op.node in started, is_repeated=n_runs[op.node] > 1
                )
            started.add(op.node)
            if self.copy_calls is not None:
                self.copy_calls.after_call(node, replaced)
            if index in due:
                self._finish_gradients(due[index])
        if in_forward:
            self._end_forward()
        self._finish_gradients(due.get(len(self.schedule.ops), []))
        self._end_piece()

    def _cloned(self, copy: GradientCopy) -> fx.Node:
        """The copy of a gradient. Autograd keeps it as it is if it has the parameter's strides."""
        gradient, aten = self.value(copy.gradient), torch.ops.aten
        if copy.strides is None:
            return self.graph.call_function(
                aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format}
            )
        shape = [*copy.gradient.meta["val"].shape]
        arguments = (gradient, shape, [*copy.strides])
        empty = self.graph.call_function(aten.new_empty_strided.default, arguments)
        return self.graph.call_function(aten.copy_.default, (empty, gradient))

    def _free(self, tensor: str) -> None:
        if self.copy_calls is not None:
            self.copy_calls.before_free(tensor)
        for node in self._live_on_storage.pop(tensor, ()):
            self._live_values.pop(node, None)

    def _write(self, write: Write) -> None:
        """Change a buffer, or a part of it."""
        if write.arguments[0] in self._in_place_results:  # the operator has written it already
            return
        part = self.value(write.buffer)
        for view in write.part:
            part = self.graph.call_function(view.operator, (part, *view.arguments))
        arguments = fx.map_arg(write.arguments, self.value)
        self.graph.call_function(write.operator, (part, *arguments))

    def _load(self, tensor: str) -> None:
        """Load the value of a parameter from the host."""
        (parameter,) = (node for node in self.sources if node.name == tensor)
        self._loaded_parameters.add(parameter)
        self._define(parameter, self.graph.call_function(load, (self.sources[parameter],)))

    def _computed_values_on(self, tensor: str) -> dict[fx.Node, Value]:
        """The live values of a tensor that operators have made. Views are left out, since they can
        be derived again."""
        values = {n: self._live_values[n] for n in self._live_on_storage.get(tensor, ())}
        return {node: value for node, value in values.items() if self._is_computed(node)}

    def _is_computed(self, node: fx.Node) -> bool:
        if node in self._loaded_parameters:
            return True
        call = node.args[0] if node.target is operator.getitem else node
        return isinstance(call, fx.Node) and call.name in self.layout.calls

    def value(self, node: fx.Node) -> Value:
        """The live value of a traced node; derives views again, and adds constants, as needed."""
        known = self._live_values.get(node)
        if known is not None:
            return known
        if node.op == "get_attr":
            new = self.graph.placeholder(str(node.target))
            self.constants[new] = getattr(self.step.captured.module, str(node.target))
        elif node.name in self.layout.calls:
            raise AssertionError(f"{node.name} is read while it is not live")
        else:
            for argument in node.all_input_nodes:  # before the copy, since it may append nodes
                self.value(argument)
            if node.target is torch.ops.aten.detach.default and node not in self._returned_nodes:
                # skipped: autograd does not see the program
                new = self.value(node.all_input_nodes[0])
            else:
                new = self.graph.node_copy(node, self.value)
        self._define(node, new)
        return new

    def _define(self, node: fx.Node, value: Value) -> None:
        self._live_values[node] = value
        self._live_on_storage.setdefault(self.layout.storage_of(node), []).append(node)

    def _call(self, name: str, *, is_recomputation: bool, is_repeated: bool) -> None:
        """Append the call of an operator.

        is_recomputation: whether this is a recomputation.
        is_repeated: whether the schedule recomputes the operator at all.
        """
        node = self.layout.calls[name]
        for argument in node.all_input_nodes:
            self.value(argument)
        if is_repeated and is_random(node):
            new = self._call_random(node, is_recomputation=is_recomputation)
        elif (overwrite := self.layout.overwriting.get(name)) is not None:
            new = self._call_overwriting(node, overwrite)
        elif not is_recomputation and (writing := self.in_place.get(name)) is not None:
            new = self.graph.call_function(writing.target, fx.map_arg(node.args, self.value))
            for value, buffer in writing.buffers.items():
                self._define(value, self.value(buffer))
        elif self._in_place_results.intersection(node.all_input_nodes):
            new = self._call_without_statistics(node)
        else:
            new = self.graph.node_copy(node, self.value)
        if is_recomputation:
            self.recomputed.add(new)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._define(node, new)
            if is_collective(node.target):  # wait for it here: until then it reads its input
                for user in node.users:
                    self.value(user)
            return
        for part in node.users:  # take the tuple apart, so that each result is freed by itself
            if part.target is operator.getitem and part not in self._live_values:
                self._define(part, self.graph.call_function(operator.getitem, (new, part.args[1])))

    def _call_without_statistics(self, node: fx.Node) -> Value:
        """Append a batch norm's backward operator, with None for the statistics (it does not read
        them: see `buffers_in_place`)."""
        target: Any = node.target
        written = self._in_place_results
        args = fx.map_arg(node.args, lambda arg: None if arg in written else self.value(arg))
        return self.graph.call_function(target, args)

    def _call_overwriting(self, node: fx.Node, overwrite: Overwrite) -> Value:
        """Append an operator that writes its result over one of its arguments."""
        args = fx.map_arg(node.args, self.value)
        kwargs = dict(fx.map_arg(node.kwargs, self.value))
        if overwrite.keyword is not None:
            kwargs[overwrite.keyword] = self.value(overwrite.argument)
        return self.graph.call_function(overwrite.target, args, kwargs)

    def _call_random(self, node: fx.Node, *, is_recomputation: bool) -> Value:
        """Append a random operator that is recomputed, with its generator's state.

        The first run saves the state as a value of the program; a recomputation restores it."""
        target: Any = node.target
        result = node.meta["val"]
        device = (result if isinstance(result, torch.Tensor) else result[0]).device
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        first: Callable[..., Any] = run_and_keep_state
        repeated: Callable[..., Any] = recompute_random
        leading: tuple[Any, ...] = (target, device)
        if isinstance(target, OpaqueForward):  # it may draw from other generators, too
            first, repeated, leading = target.keep_state, target.run_again, ()
        if is_recomputation:
            state = self._states[node.name]
            return self.graph.call_function(repeated, (*leading, state, *args), kwargs)
        both = self.graph.call_function(first, (*leading, *args), kwargs)
        new = self.graph.call_function(operator.getitem, (both, 0))
        self._states[node.name] = self.graph.call_function(operator.getitem, (both, 1))
        return new

    def _end_forward(self) -> None:
        self.outputs = tuple(
            self.value(item) if isinstance(item, fx.Node) and item.op != "placeholder" else item
            for item in self.step.captured.outputs
        )
        self._end_piece()

    def _finish_gradients(self, gradients: list[tuple[fx.Node, fx.Node]]) -> None:
        """Let complete gradients leave, now or together with the next ones.

        gradients: pairs of a leaf and its gradient, both traced nodes.

        A piece costs the host as much as several operators. If gradients accumulate, each one is
        added and freed at once, so each has its own piece. Else they are held to the end of the
        step anyway, so a few share a piece.
        """
        for leaf, gradient in gradients:
            copied = self._cloned_gradients.get(self.layout.gradients.get(leaf, ""))
            self._current_gradients.append(
                (leaf, self.value(gradient) if copied is None else copied)
            )
        accumulates = accumulation(self.step.graph.meta.gradients).to_parameters
        started = self.piece_ends[-1] if self.piece_ends else 0
        if accumulates or len(self.graph.nodes) - started >= LEAST_IN_PIECE:
            self._end_piece()

    def _end_piece(self) -> None:
        self.piece_ends.append(len(self.graph.nodes))
        self.piece_gradients.append(self._current_gradients)
        self._current_gradients = []


def gradients_due(
    step: CapturedStep, schedule: Schedule
) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
    """When each gradient leaves: index of an op of the schedule -> pairs of a leaf and its gradient
    that leave after that op.

    A gradient leaves once it is complete and nothing reads its leaf any more. In eager mode, too, a
    parameter has been read for the last time when hooks receive its gradient, and an optimizer
    inside of the backward pass changes it then. Gradients that are inputs of the step leave at its
    end.
    """
    graph, layout = step.graph, step.layout
    last_run: dict[str, int] = {}
    last_read: dict[str, int] = {}
    freed: dict[str, int] = {}
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Free):
            freed[op.tensor] = index
        if not isinstance(op, Compute):
            continue
        last_run[op.node] = index
        last_read |= dict.fromkeys(graph.node_by_name[op.node].inputs, index)
    backward = min((last_run[node.name] for node in graph.later_nodes), default=0)
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    due: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
    for leaf, gradient in step.captured.gradients.items():
        storage = layout.gradients.get(leaf, layout.storage[gradient])
        producer = graph.producer.get(storage)
        index = len(schedule.ops)
        if producer is not None:
            # A gradient that is cloned for other leaves leaves after the last clone: while the
            # program holds it, autograd would copy it as well.
            copies = [n for n, c in layout.copies.items() if layout.storage[c.gradient] == storage]
            last = max((producer.name, *copies), key=position.__getitem__)
            read = last_read.get(layout.storage[leaf], backward)
            index = max(last_run[last], read, backward)
            index = min(index, freed.get(storage, index + 1) - 1)
        due.setdefault(index, []).append((leaf, gradient))
    return due
