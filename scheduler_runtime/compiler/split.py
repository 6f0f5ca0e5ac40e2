"""From a schedule back to a compiler's two halves: what is saved, and what runs again where.

The line of `scheduler_runtime.compiler.joined` is written out anew in the schedule's order, an
operator that runs again as a copy with a name of its own, and PyTorch's own function cuts it where
the forward pass ends. Views are not ops of a schedule: they are derived again from the storage that
they point at.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from scheduler_runtime.compiler.joined import Joined, saved_bytes_of
from solver.schedule import Free, Schedule


class UnsplittableError(ValueError):
    """The line cannot be cut as planned; says why."""


def split(joined: Joined, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """The forward and the backward half of a schedule of `joined.graph`, and the bytes saved.

    Raises UnsplittableError where what would be saved is no tensor.
    """
    _refuse_late_writes(joined)
    line = _Rewriter(joined)
    line.write(schedule)
    saved = line.saved()
    for node in saved:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise UnsplittableError(
                f"{node.name} ({node.target}) is read by the backward pass and is no tensor, but "
                f"{type(node.meta.get('val')).__name__}; compile with fixed shapes"
            )
    module = fx.GraphModule(joined.module, line.graph)
    origins = [line.origin[node] for node in saved]
    forward, backward = _extract_fwd_bwd_modules(
        module, saved, saved_sym_nodes=[], num_fwd_outputs=joined.n_outputs
    )
    return forward, backward, saved_bytes_of(joined, origins)


def _refuse_late_writes(joined: Joined) -> None:
    for node in joined.module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if _is_backward(node) and schema is not None and schema.is_mutable:
            raise UnsplittableError(
                f"{node.name} ({node.target}) writes into one of its inputs in the backward pass, "
                "which no plan may move; plan this module eagerly with solve and apply"
            )


class _Rewriter:
    """Writes the line in the order of a schedule. `origin`: new node -> node of the old line."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.graph = fx.Graph()
        self.origin: dict[fx.Node, fx.Node] = {}
        self._current: dict[fx.Node, fx.Node] = {}  # old node -> the new one in force
        self._of_storage: dict[str, list[fx.Node]] = {}
        self._first: dict[fx.Node, fx.Node] = {}  # old node -> its first new one
        self._n_forward = 0
        old = joined.module.graph.nodes
        self._body = [n for n in old if n.op == "call_function" and not _is_backward(n)]
        self._written = 0  # of the forward half's nodes
        self._names = {node.name: node for node in old}

    def write(self, schedule: Schedule) -> None:
        for node in self.joined.module.graph.find_nodes(op="placeholder"):
            self._define(node, self.graph.node_copy(node))
        phases = {node.name: node.phase for node in self.joined.graph.nodes}
        started: set[str] = set()
        for op in schedule.ops:
            if isinstance(op, Free):
                self._forget(op.tensor)
                continue
            node = self.joined.layout.calls.get(op.node)
            if node is None:
                continue  # an update or a copy, which the line has in its own words
            if phases[op.node] == "backward" and not self._n_forward:
                self._end_forward()
            if phases[op.node] == "forward" and op.node not in started:
                self._write_up_to(node)
            else:
                self._call(node, again=op.node in started)
            started.add(op.node)
        if not self._n_forward:
            self._end_forward()
        self._output()

    def saved(self) -> list[fx.Node]:
        """What the forward half makes, or is given, and the backward half reads."""
        position = {node: index for index, node in enumerate(self.graph.nodes)}
        tangents = {self._first[node] for node in self.joined.tangents}
        (output,) = self.graph.find_nodes(op="output")
        read = set(output.args[0][self.joined.n_outputs :])
        return [
            node
            for node, index in position.items()
            if index < self._n_forward
            and node not in tangents
            and (node in read or self._is_read_later(node, position, output))
        ]

    def _is_read_later(self, node: fx.Node, position: dict[fx.Node, int], output: fx.Node) -> bool:
        return any(position[user] >= self._n_forward for user in node.users if user is not output)

    def _write_up_to(self, node: fx.Node) -> None:
        """The forward half as it stands, views and effects included, up to this call."""
        while self._written < len(self._body):
            old = self._body[self._written]
            self._written += 1
            if old.name in self.joined.layout.calls and old is not node:
                raise AssertionError(f"{old.name} is passed over on the way to {node.name}")
            if old.name in self.joined.layout.calls:
                self._call(old, again=False)
                return
            self._copy_plain(old)

    def _copy_plain(self, old: fx.Node) -> None:
        """A view, or an operator that has an effect alone, where the forward half has it.

        What stands on a storage that the schedule has dropped since is no value for later readers.
        """
        if old in self._first:
            return
        for argument in old.all_input_nodes:
            if argument.op == "get_attr":
                self.value(argument)
        new = self.graph.node_copy(old, lambda n: self._current.get(n) or self._first[n])
        if all(argument in self._current for argument in old.all_input_nodes):
            self._define(old, new)
        else:
            self._first[old] = new
            self.origin[new] = old

    def _end_forward(self) -> None:
        """Write what is left, and keep of the views those that the compiler would save."""
        while self._written < len(self._body):
            old = self._body[self._written]
            self._written += 1
            self._copy_plain(old)
        self._n_forward = len(self.graph.nodes)
        saved = set(self.joined.saved)
        for nodes in self._of_storage.values():
            for old in [n for n in nodes if _is_view(n, self.joined) and n not in saved]:
                nodes.remove(old)
                self._current.pop(old, None)

    def value(self, old: fx.Node) -> fx.Node:
        """The value in force; a view is derived from its storage where there is none."""
        known = self._current.get(old)
        if known is not None:
            return known
        if old.name in self.joined.layout.calls:
            raise AssertionError(f"{old.name} is read while it is not there")
        for argument in old.all_input_nodes:
            self.value(argument)
        new = self._copied(old)
        self._define(old, new)
        return new

    def _copied(self, old: fx.Node) -> fx.Node:
        new = self.graph.node_copy(old, self.value)
        new.meta = dict(old.meta)
        if self._n_forward and old.op == "call_function":
            new.meta["partitioner_tag"] = "is_backward"
        return new

    def _call(self, old: fx.Node, *, again: bool) -> None:
        for argument in old.all_input_nodes:
            self.value(argument)
        new = self._copied(old)
        if again:
            # Later passes may sort by these, or take equal names for the same value.
            new.name = self.graph._graph_namespace.create_name(f"{old.name}_again", new)
        if isinstance(old.meta.get("val"), torch.Tensor):
            self._define(old, new)
            return
        self._first.setdefault(old, new)
        self.origin[new] = old
        self._current[old] = new
        for part in old.users:
            if part.target is operator.getitem and part not in self._current:
                self._define(part, self._copied(part))
        del self._current[old]

    def _define(self, old: fx.Node, new: fx.Node) -> None:
        self.origin[new] = old
        self._current[old] = new
        self._first.setdefault(old, new)
        storage = self.joined.layout.storage.get(old)
        if storage is None:
            storage = self._storage_of_parts(old)
        self._of_storage.setdefault(storage, []).append(old)

    def _storage_of_parts(self, old: fx.Node) -> str:
        """A view with several outputs (split) lives on the storage that it is derived from."""
        stack = list(old.all_input_nodes)
        while stack:
            argument = stack.pop()
            if argument in self.joined.layout.storage:
                return self.joined.layout.storage[argument]
            stack.extend(argument.all_input_nodes)
        return old.name

    def _forget(self, storage: str) -> None:
        for old in self._of_storage.pop(storage, ()):
            self._current.pop(old, None)

    def _output(self) -> None:
        (old,) = self.joined.module.graph.find_nodes(op="output")
        n_outputs = self.joined.n_outputs
        values = [
            (self._first[item] if index < n_outputs else self.value(item))
            if isinstance(item, fx.Node)
            else item
            for index, item in enumerate(old.args[0])
        ]
        new = self.graph.output(tuple(values))
        new.meta = dict(old.meta)


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _is_view(node: fx.Node, joined: Joined) -> bool:
    if node.op == "placeholder" or node.name in joined.layout.calls:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return not (isinstance(source, fx.Node) and source.name in joined.layout.calls)
    return True
