"""The rules of a legal schedule, and the device state that they are applied to, op by op.

1. Tensors that no node outputs are resident: live from before the first op to the end.
2. A storage's bytes are held as long as any tensor on it is on the device.
3. `Compute` needs all its inputs on the device, and the storages of which it makes aliases. It
   allocates all its outputs: those still live from before are counted a second time while it
   runs. It is illegal if all its outputs are live, or if an alias that another node made, or one
   left over without its root, still holds the old storage. The workspace counts while it runs.
4. Each forward node runs at least once, first runs in graph order; a node that is not recomputable
   and each node of a later phase runs exactly once, in graph order. All forward nodes have run
   before the first later one.
5. `Free` drops a live tensor that a node made; an output of the graph is not freed after its last
   computation.
6. At the end every output of the graph is on the device.
7. A copy needs its storage at its source and not at its target: `Store` on the device and not on
   the host, `Fetch` the reverse, `Spill` on the host and not on the disk, `Load` the reverse.
   `Drop` needs it on the host, `Delete` on the disk. Resident storages are not copied, nor are
   those of outputs of the graph: whoever receives an output holds its memory. Nor are those that
   the graph says cannot be copied (`Tensor.copyable`).
8. `Fetch` brings back every tensor on the storage that has been made so far, except what has been
   overwritten. They are live again, and each is freed by itself.
9. A node may overwrite a storage only if neither the host nor the disk has a copy of it. So a copy
   there always equals the current contents of the storage: recomputing it gives the same bits.
10. If several micro-batches are in flight (`Graph.n_in_flight`), each of the others holds as many
   bytes as this schedule holds, without resident tensors, when the forward pass has ended: after
   all forward nodes have run and before anything else is computed. They count at every op before
   the optimizer's first. After the forward pass, the gradients accumulated over the micro-batches
   (`Graph.accumulated`) and what completed ones leave (`Graph.in_turn`) count where that is more
   (`solver.schedule.ops.other_micro_batch_bytes`).
11. The optimizer's state and the parameters that are in host memory (`Graph.host_state_bytes`) are
   there from before the first op to the end. In a step that has some, an optimizer node has all
   streams to itself: it starts when the copies before it have ended, and those after it start when
   it has ended.
"""

from __future__ import annotations

from functools import cached_property

from graphs.graph import Graph, Node, Tensor
from solver.schedule.ops import Compute, Copy, Delete, Drop, Fetch, Free, Op, Store, word_for
from solver.schedule.simulation import IllegalScheduleError, Layer, Stay
from solver.schedule.streams import CopyError, Streams

_AFTER_FORWARD = ("backward", "optimizer")


class Device:
    """The state of the device: which tensors are on it, and which nodes have run.

    Call `run` for each op in order, appending what it returns to `live_bytes`, then `end`.

    stays: filled with every stay of a storage (None: not asked for).
    streams: the copies on host and disk, and their times (None: the schedule has no copies).
    """

    def __init__(self, graph: Graph, stays: list[Stay] | None, streams: Streams | None) -> None:
        self.graph = graph
        self.streams = streams
        self.bytes = graph.resident_bytes
        self.live_bytes: list[int] = []  # during each op so far, for this micro-batch
        self._saved_bytes: int | None = None  # once the forward pass has ended
        self.times_s: list[float] = []
        self.n_recomputed = 0
        self._live = {tensor.name for tensor in graph.resident}
        self._stays = stays
        self._open_stays: dict[str, tuple[Layer, int]] = {}  # storage -> its layer and start
        self._n_live_on: dict[str, int] = {}  # storage -> number of live tensors on it
        self._nodes_run: set[str] = set()
        self._overwritten: set[str] = set()

    def run(self, op: Op) -> int:
        """Apply one op; return the bytes on the device during it. Raises IllegalScheduleError."""
        if isinstance(op, Free):
            return self._free(op.tensor)
        if not isinstance(op, Compute):
            return self._copy_or_drop(op)
        node = self.graph.node_by_name.get(op.node)
        if node is None:
            raise self._illegal(f"compute names {op.node!r}, which is not a node of the graph")
        self._check_order(node)
        self._check_tensors(node)
        if self._saved_bytes is None and len(self._nodes_run) >= len(self.graph.forward_nodes):
            self._saved_bytes = self.bytes - self.graph.resident_bytes
        return self._compute(node)

    @property
    def saved_bytes(self) -> int:
        """Bytes on the device when the forward pass has ended, without resident tensors."""
        if self._saved_bytes is None:
            return self.bytes - self.graph.resident_bytes
        return self._saved_bytes

    def _illegal(self, reason: str) -> IllegalScheduleError:
        return IllegalScheduleError(len(self.live_bytes), reason)

    def _check_order(self, node: Node) -> None:
        """Rule 4: the node may run now, by the order of first runs and by how often it may run."""
        if node.name in self._nodes_run:
            if node.phase != "forward":
                raise self._illegal(f"{node.phase} node {node.name!r} runs a second time")
            if not node.recomputable:
                raise self._illegal(f"{node.name!r} runs a second time, but is not recomputable")
            return
        expected = self.graph.nodes[len(self._nodes_run)]
        if node.name == expected.name:
            return
        if node.phase == "forward":
            raise self._illegal(
                f"{node.name!r} runs for the first time before {expected.name!r} has"
            )
        if expected.phase == "forward":
            raise self._illegal(
                f"{node.phase} node {node.name!r} runs before forward node {expected.name!r}"
            )
        raise self._illegal(f"{node.name!r} runs before {expected.name!r} has")

    def _check_tensors(self, node: Node) -> None:
        """Rules 3 and 9: what the node reads is on the device, and it may write its outputs."""
        for name in node.inputs:
            if name not in self._live:
                raise self._illegal(f"{node.name!r} reads {name!r}, which is not on the device")
        for name in node.outputs:
            root = self.graph.root(name)
            is_made_elsewhere = root in self.graph.producer and root not in node.outputs
            if is_made_elsewhere and not self._n_live_on.get(root, 0):
                raise self._illegal(
                    f"{node.name!r} makes {name!r}, an alias of {root!r}, whose storage is not on "
                    "the device"
                )
        if node.name in self._nodes_run:
            self._check_recompute(node)
        if node.overwrites is not None and self.streams is not None:
            root = self.graph.root(node.overwrites)
            if where := self.streams.places_with_copy(root):
                raise self._illegal(
                    f"{node.name!r} overwrites {root!r}, of which the {where} has a copy; drop "
                    "that copy first"
                )

    def _check_recompute(self, node: Node) -> None:
        """Rule 3: some output is missing, and no alias keeps an old storage alive."""
        live = [name for name in node.outputs if name in self._live]
        if len(live) == len(node.outputs):
            raise self._illegal(
                f"{node.name!r} is recomputed while all its outputs are on the device"
            )
        for name in node.outputs:
            if self.graph.root(name) != name:
                continue
            holders = self._n_live_on.get(name, 0)
            replaced = [other for other in live if self.graph.root(other) == name]
            if holders and (name not in live or holders > len(replaced)):
                raise self._illegal(
                    f"{node.name!r} recomputes {name!r} while an alias holds its old storage"
                )

    def _compute(self, node: Node) -> int:
        """Run a node that has passed the checks; return the bytes on the device meanwhile."""
        allocated_bytes = 0
        replaced_bytes = 0
        streams, root_of = self.streams, self.graph.root
        if streams is not None:
            if self.graph.host_state_bytes and node.phase == "optimizer":
                streams.wait_for_all()
            # The node waits for inputs that are being fetched. Outputs that it replaces are given
            # up when it has run.
            reads = map(root_of, self.graph.needs[node.name])
            streams.compute(len(self.live_bytes), node.time_s, reads)
            for name in node.outputs:
                if name in self._live and root_of(name) == name:
                    streams.wait_until_reusable(name)
        for name in node.outputs:
            tensor = self.graph.tensor_by_name[name]
            if tensor.alias_of is None:
                allocated_bytes += tensor.size_bytes
                replaced_bytes += tensor.size_bytes if name in self._live else 0
                if self._stays is not None:
                    self._start_stay(name, node)
        during_bytes = self.bytes + allocated_bytes + node.workspace_bytes
        self.bytes += allocated_bytes - replaced_bytes
        for name in node.outputs:
            if name not in self._live:
                self._live.add(name)
                root = root_of(name)
                self._n_live_on[root] = self._n_live_on.get(root, 0) + 1
        if node.name in self._nodes_run:
            self.n_recomputed += 1
        if node.overwrites is not None:
            root = root_of(node.overwrites)
            self._overwritten.update((root, *self.graph.views[root]))
            self._overwritten.difference_update(node.outputs)
            # The storage now holds this node's output, so a new stay begins.
            if self._stays is not None and root in self._open_stays:
                self._end_stay(root, len(self.live_bytes))
                self._start_stay(root, node)
        self._nodes_run.add(node.name)
        self.times_s.append(node.time_s)
        return during_bytes

    def _copy_or_drop(self, op: Op) -> int:
        """Apply a copy between device, host and disk, or give up the copy on the host or disk."""
        if self.streams is None or not isinstance(op, Copy | Drop | Delete):
            raise self._illegal(f"{op!r} is not an op of a schedule")
        storage = op.storage
        tensor = self.graph.tensor_by_name.get(storage)
        try:
            if tensor is None:
                raise CopyError("which is not a tensor of the graph")
            if tensor.alias_of is not None:
                raise CopyError(f"an alias; name its storage, {tensor.alias_of!r}")
            if storage not in self.graph.producer:
                raise CopyError("which is resident and stays")
            if isinstance(op, Store) and storage in self._output_storages:
                raise CopyError(
                    "which leaves the step (an output of the model, or a gradient): its memory is "
                    "the caller's"
                )
            if not tensor.copyable:
                raise CopyError("which cannot be copied (copyable is false)")
            if isinstance(op, Drop | Delete):
                self.streams.drop_copy(op, tensor.size_bytes)
            else:
                on_device = self._n_live_on.get(storage, 0) > 0
                position = len(self.live_bytes)
                self.streams.copy(position, op, tensor.size_bytes, on_device=on_device)
        except CopyError as error:
            raise self._illegal(f"{word_for(op)} names {storage!r}, {error}") from None
        if isinstance(op, Fetch):
            self._restore_fetched(tensor)
        return self.bytes

    @cached_property
    def _output_storages(self) -> frozenset[str]:
        """The storages of the graph's outputs."""
        return frozenset(map(self.graph.root, self.graph.outputs))

    def _restore_fetched(self, tensor: Tensor) -> None:
        """Rule 8: make the tensors on a fetched storage live again."""
        on_storage = (tensor.name, *self.graph.views.get(tensor.name, ()))
        restored = [
            name
            for name in on_storage
            if self.graph.producer[name].name in self._nodes_run and name not in self._overwritten
        ]
        self._live.update(restored)
        self._n_live_on[tensor.name] = len(restored)
        self.bytes += tensor.size_bytes
        if self._stays is not None:
            phase = self.graph.producer[tensor.name].phase
            layer: Layer = "gradients" if phase in _AFTER_FORWARD else "kept"
            self._open_stays[tensor.name] = layer, len(self.live_bytes)

    def _start_stay(self, storage: str, node: Node) -> None:
        """Begin a stay of a storage that the node allocates or overwrites; end the one before."""
        position = len(self.live_bytes)
        if storage in self._open_stays:  # replaced: both copies count while the node runs
            self._end_stay(storage, position + 1)
        layer: Layer = "recomputed" if node.name in self._nodes_run else "kept"
        if node.phase in _AFTER_FORWARD:
            layer = "gradients"
        self._open_stays[storage] = layer, position

    def _end_stay(self, storage: str, stop: int) -> None:
        assert self._stays is not None
        layer, start = self._open_stays.pop(storage)
        self._stays.append(Stay(storage, layer, start, stop))

    def _free(self, name: str) -> int:
        """Rule 5: free a tensor; its storage's bytes are released with the last tensor on it."""
        producer = self.graph.producer.get(name)
        if producer is None:
            known = name in self.graph.tensor_by_name
            raise self._illegal(
                f"free names {name!r}, which "
                + ("is resident and stays to the end" if known else "is not a tensor of the graph")
            )
        if name not in self._live:
            raise self._illegal(f"free names {name!r}, which is not on the device")
        self._live.discard(name)
        root = self.graph.root(name)
        self._n_live_on[root] -= 1
        if self._n_live_on[root] == 0 and root in self.graph.producer:
            self.bytes -= self.graph.tensor_by_name[root].size_bytes
            if self.streams is not None:
                self.streams.wait_until_reusable(root)
            if self._stays is not None:
                self._end_stay(root, len(self.live_bytes))
        return self.bytes

    def end(self) -> None:
        """Check what must hold at the end (rules 4 and 6), and close the open stays.

        Raises IllegalScheduleError.
        """
        if len(self._nodes_run) < len(self.graph.nodes):
            missing = self.graph.nodes[len(self._nodes_run)].name
            raise IllegalScheduleError(None, f"{missing!r} has never run")
        for name in self.graph.outputs:
            if name not in self._live:
                raise IllegalScheduleError(None, f"output {name!r} is not on the device")
        for storage in tuple(self._open_stays):
            self._end_stay(storage, len(self.live_bytes))
