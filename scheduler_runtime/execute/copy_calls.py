"""Write the copies of a schedule as calls into the generated program.

Each copy op becomes a call of the method of `copies.Copies` with its name. Two calls are added:
`arrive` before the first computation that reads a fetched storage, and `leave` where the last
tensor on a copied storage is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from graphs.graph import Graph, Node
from scheduler_runtime.execute.piece import Value
from solver.schedule import Copy, CopyLayout, Delete, Drop, Fetch, Load, Spill, Store

Values = Mapping[fx.Node, Value]
"""Traced node -> its live value."""


class CopyCalls:
    """Appends the calls to the program, and keeps track of what is on the device.

    line: the program's straight line of fx nodes.
    values: tensor -> the live values that operators have made on it, without views of them.
    define: sets the value of a traced node.
    copies: the value that is the step's `Copies`.
    """

    def __init__(
        self,
        graph: Graph,
        layout: CopyLayout,
        line: fx.Graph,
        *,
        values: Callable[[str], Values],
        define: Callable[[fx.Node, Value], None],
    ) -> None:
        self.copies = line.placeholder("copies")
        self._graph = graph
        self._layout = layout
        self._line = line
        self._values = values
        self._define = define
        self._live: dict[str, set[str]] = {}  # storage -> live tensors on it
        self._computed_nodes: set[str] = set()
        self._overwritten: set[str] = set()
        # on the device, and copied from or to it since it came
        self._copied_storages: set[str] = set()
        self._arriving: set[str] = set()
        self._stored: dict[str, tuple[fx.Node, ...]] = {}

    def before_free(self, tensor: str) -> None:
        """To be called right before the values of a tensor are dropped."""
        storage = self._graph.root(tensor)
        if self._live[storage] == {tensor}:
            self._leave(storage, self._values(tensor).values())
        self._live[storage].discard(tensor)

    def before_call(self, node: Node) -> dict[str, tuple[Value, ...]]:
        """To be called right before the call of an operator.

        Returns, for `after_call`, the copied storages that the operator makes anew while they are
        still live, each with its live values.
        """
        for storage in dict.fromkeys(map(self._graph.root, self._graph.needs[node.name])):
            if storage in self._arriving:
                self._call("arrive", storage)
                self._arriving.discard(storage)
        replaced = (name for name in node.outputs if name in self._copied_storages)
        return {
            name: tuple(self._values(name).values())
            for name in replaced
            if self._graph.root(name) == name
        }

    def after_call(self, node: Node, replaced: Mapping[str, tuple[Value, ...]]) -> None:
        """To be called right after the call of an operator.

        replaced: what `before_call` returned.
        """
        for storage, values in replaced.items():
            self._leave(storage, values)
        for name in node.outputs:
            self._live.setdefault(self._graph.root(name), set()).add(name)
        self._computed_nodes.add(node.name)
        if node.overwrites is not None:
            self._overwritten.update(self._tensors_on(self._graph.root(node.overwrites)))
            self._overwritten.difference_update(node.outputs)

    def append(self, position: int, op: Copy | Drop | Delete) -> None:
        """Append the call of a copy op. position: of the op in the schedule."""
        storage, at = op.storage, self._layout.address.get(position, 0)
        if isinstance(op, Store):
            self._store(storage, at)
        elif isinstance(op, Fetch):
            self._fetch(storage)
        elif isinstance(op, Spill):
            self._call("spill", storage, at)
        elif isinstance(op, Load):
            self._call("load", storage, at)
        else:
            self._call("drop" if isinstance(op, Drop) else "delete", storage)

    def _store(self, storage: str, at: int) -> None:
        known = [name for name in self._tensors_on(storage) if name not in self._overwritten]
        values = {node: v for name in known for node, v in self._values(name).items()}
        if not values:
            raise ValueError(
                f"the schedule stores {storage!r} while only what was overwritten there is live"
            )
        stop = at + self._graph.tensor_by_name[storage].size_bytes
        self._call("store", storage, at, stop, *values.values())
        self._stored[storage] = tuple(values)
        self._copied_storages.add(storage)

    def _fetch(self, storage: str) -> None:
        fetched = self._call("fetch", storage)
        for index, node in enumerate(self._stored[storage]):
            self._define(node, self._line.call_method("__getitem__", (fetched, index)))
        self._live[storage] = {
            name
            for name in self._tensors_on(storage)
            if self._graph.producer[name].name in self._computed_nodes
            and name not in self._overwritten
        }
        self._copied_storages.add(storage)
        self._arriving.add(storage)

    def _leave(self, storage: str, values: Iterable[Value]) -> None:
        if storage in self._copied_storages:
            self._call("leave", storage, *values)
            self._copied_storages.discard(storage)
            self._arriving.discard(storage)

    def _call(self, method: str, *arguments: Any) -> Value:
        return self._line.call_method(method, (self.copies, *arguments))

    def _tensors_on(self, storage: str) -> tuple[str, ...]:
        """The names of all tensors on a storage."""
        return storage, *self._graph.views.get(storage, ())
