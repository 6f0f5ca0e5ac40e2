"""Optimal schedules with copies for tiny graphs, by brute force over all states and their clocks.

A state is how many nodes have run, which tensors are on the device, and which storages are on the
host and on the disk. The time to reach it is not a number but a vector of clocks: when the compute
stream, the two directions of each link, and the copies from and to each storage are done. If two
ways lead to a state and one is later in no clock, the other is dropped. Bytes do not depend on the
clocks. This shares no code with the solver.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import le
from typing import NamedTuple

from graphs.graph import Graph
from tests.support.brute_force import Optimum, ops_to


@dataclass(frozen=True)
class HostLink:
    """The host or the disk: its capacity, and seconds per byte in each direction."""

    capacity_bytes: int
    out_s_per_byte: float
    in_s_per_byte: float
    latency_s: float = 0.0


class State(NamedTuple):
    """A state; all fields but the first are bit masks.

    done: number of nodes that have run.
    live: tensors on the device.
    host, disk: storages that are there.
    lost: tensors that have been overwritten.
    """

    done: int
    live: int
    host: int
    lost: int
    disk: int = 0


class Clocks(NamedTuple):
    """When streams and copies are done, in seconds; tuples have an entry for each storage.

    compute, out, in_, spill, load: streams: compute, to and from the host, to and from the disk.
    ready: the storage's fetch to the device.
    busy: any copy from or to the storage on the device.
    whole: the copy that put the storage on the host.
    host_busy: any copy from or to the storage on the host.
    free: all copies of what was dropped from the host, so that its memory can be reused.
    kept, disk_busy, disk_free: as whole, host_busy and free, for the disk.
    """

    compute: float
    out: float
    in_: float
    free: float
    ready: tuple[float, ...]
    busy: tuple[float, ...]
    whole: tuple[float, ...]
    host_busy: tuple[float, ...]
    kept: tuple[float, ...]
    disk_busy: tuple[float, ...]
    spill: float = 0.0
    load: float = 0.0
    disk_free: float = 0.0


class TooManyStatesError(Exception):
    """The graph is too large for the search."""


def fastest(
    graph: Graph,
    *,
    budget_bytes: int,
    host: HostLink,
    disk: HostLink | None = None,
    max_labels: int = 40_000,
) -> Optimum:
    """The least time over all legal schedules with copies.

    Raises TooManyStatesError after more than `max_labels` pairs of state and clocks.
    """
    step = _Step(graph, host, disk)
    host_bytes = host.capacity_bytes - graph.host_state_bytes
    disk_bytes = 0 if disk is None else disk.capacity_bytes
    if host_bytes < 0:
        return Optimum(math.inf, None)
    none = (0.0,) * len(step.roots)
    start = (State(0, 0, 0, 0), Clocks(0.0, 0.0, 0.0, 0.0, *[none] * 6))
    known: dict[State, dict[Clocks, list[float]]] = {start[0]: {start[1]: []}}
    came: dict[tuple[State, Clocks], tuple[tuple[State, Clocks], tuple[str, str]]] = {}
    queue = [(0.0, 0, start)]
    n_labels = 0
    while queue:
        _, _, (state, clocks) = heapq.heappop(queue)
        if clocks not in known[state]:
            continue
        if step.is_end(state, clocks):
            return Optimum(_end_s(clocks), ops_to(came, (state, clocks)))
        for op, after, times, peak_bytes in step.moves(state, clocks):
            if peak_bytes > budget_bytes or step.host_bytes(after.host) > host_bytes:
                continue
            if step.host_bytes(after.disk) > disk_bytes:
                continue
            times, flat = _settled(times)
            # keep only clocks that no other clocks of the same state dominate
            others = known.setdefault(after, {})
            if any(all(map(le, other, flat)) for other in others.values()):
                continue
            for later in [c for c, other in others.items() if all(map(le, flat, other))]:
                del others[later]
            others[times] = flat
            came[after, times] = ((state, clocks), op)
            n_labels += 1
            if n_labels > max_labels:
                raise TooManyStatesError
            # A*: in the order of a lower bound on the end, with all nodes that have not run yet
            least_s = max(_end_s(times), times.compute + step.left_s[after.done])
            heapq.heappush(queue, (least_s, n_labels, (after, times)))
    return Optimum(math.inf, None)


def _end_s(clocks: Clocks) -> float:
    return max(clocks.compute, clocks.out, clocks.in_, clocks.spill, clocks.load)


def _settled(clocks: Clocks) -> tuple[Clocks, list[float]]:
    """Raise all clocks to at least that of the compute stream: what is done before that does not
    matter any more. Also returns all clocks in one list, for comparing."""
    now, settled, flat = clocks.compute, [], list[float]()
    for value in clocks:
        if isinstance(value, tuple):
            times = [time if time > now else now for time in value]
            settled.append(tuple(times))
            flat += times
        else:
            settled.append(value if value > now else now)
            flat.append(settled[-1])
    return Clocks(*settled), flat


def _set(values: tuple[float, ...], i: int, value: float) -> tuple[float, ...]:
    return (*values[:i], value, *values[i + 1 :])


class _Step:
    """The states of a step and the moves between them; u is the index of a storage."""

    def __init__(self, graph: Graph, host: HostLink, disk: HostLink | None) -> None:
        self.graph, self.host, self.disk = graph, host, disk
        made = [tensor for tensor in graph.tensors if tensor.name in graph.producer]
        self.names = [tensor.name for tensor in made]
        self.bit = {name: 1 << i for i, name in enumerate(self.names)}
        size = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
        root = {tensor.name: tensor.alias_of or tensor.name for tensor in graph.tensors}
        self.roots = [tensor.name for tensor in made if tensor.alias_of is None]
        self.number = {name: i for i, name in enumerate(self.roots)}
        self.storage_of = [self.number.get(root[name], -1) for name in self.names]
        self.members = [0] * len(self.roots)
        for i, u in enumerate(self.storage_of):
            if u >= 0:
                self.members[u] |= 1 << i
        self.size = [size[name] for name in self.roots]
        self.resident_bytes = sum(
            t.size_bytes for t in graph.tensors if t.name not in self.bit and t.alias_of is None
        )
        self.inputs = [self._mask(node.inputs) for node in graph.nodes]
        self.outputs = [self._mask(node.outputs) for node in graph.nodes]
        # By node: storages that it makes, those that it makes aliases of, all that it reads, and
        # the one that it overwrites.
        self.made_roots = [
            [self.number[name] for name in node.outputs if name in self.number]
            for node in graph.nodes
        ]
        self.alias_needs = [
            sorted(
                {
                    self.number[root[name]]
                    for name in node.outputs
                    if root[name] in self.number and root[name] not in node.outputs
                }
            )
            for node in graph.nodes
        ]
        self.reads = [
            sorted(
                {self.number[root[name]] for name in node.inputs if root[name] in self.number}
                | set(self.alias_needs[p])
            )
            for p, node in enumerate(graph.nodes)
        ]
        self.over = [
            self.number[root[node.overwrites]] if node.overwrites else None for node in graph.nodes
        ]
        # number of nodes that have run -> seconds of those that have not
        self.left_s = list(accumulate((n.time_s for n in reversed(graph.nodes)), initial=0.0))[::-1]
        self.goal = self._mask(graph.outputs)
        never_stored = {root[t] for t in graph.outputs} | {t.name for t in made if not t.copyable}
        self.never_stored = {u for name, u in self.number.items() if name in never_stored}

    def _mask(self, names: tuple[str, ...]) -> int:
        mask = 0
        for name in names:
            mask |= self.bit.get(name, 0)
        return mask

    def is_end(self, state: State, clocks: Clocks) -> bool:
        return state.done == len(self.graph.nodes) and self.goal & ~state.live == 0

    def host_bytes(self, host: int) -> int:
        return sum(size for u, size in enumerate(self.size) if host >> u & 1)

    def device_bytes(self, live: int) -> int:
        return self.resident_bytes + sum(
            size for members, size in zip(self.members, self.size, strict=True) if live & members
        )

    def moves(
        self, state: State, clocks: Clocks
    ) -> Iterator[tuple[tuple[str, str], State, Clocks, int]]:
        """Yield (op, next state, next clocks, bytes on the device during the op)."""
        yield from self._frees(state, clocks)
        yield from self._copies(state, clocks)
        if self.disk is not None:
            yield from self._disk_copies(self.disk, state, clocks)
        for p in range(min(state.done + 1, len(self.graph.nodes))):
            yield from self._compute(p, state, clocks)

    def _frees(
        self, state: State, clocks: Clocks
    ) -> Iterator[tuple[tuple[str, str], State, Clocks, int]]:
        for i, name in enumerate(self.names):
            if state.live >> i & 1:
                live = state.live & ~(1 << i)
                u, times = self.storage_of[i], clocks
                if u >= 0 and not live & self.members[u]:
                    times = self._leave(u, clocks)
                yield ("free", name), state._replace(live=live), times, 0

    @staticmethod
    def _leave(u: int, clocks: Clocks) -> Clocks:
        """Free a storage on the device: the compute stream waits for its copies."""
        return clocks._replace(
            compute=max(clocks.compute, clocks.busy[u]),
            ready=_set(clocks.ready, u, 0.0),
            busy=_set(clocks.busy, u, 0.0),
        )

    def _copies(
        self, state: State, clocks: Clocks
    ) -> Iterator[tuple[tuple[str, str], State, Clocks, int]]:
        for u, name in enumerate(self.roots):
            on_device, on_host = state.live & self.members[u], state.host >> u & 1
            if on_device and not on_host and u not in self.never_stored:
                start_s = max(clocks.compute, clocks.out, clocks.ready[u], clocks.free)
                end_s = start_s + self.host.latency_s + self.size[u] * self.host.out_s_per_byte
                times = clocks._replace(
                    out=end_s,
                    busy=_set(clocks.busy, u, max(clocks.busy[u], end_s)),
                    whole=_set(clocks.whole, u, end_s),
                    host_busy=_set(clocks.host_busy, u, end_s),
                )
                yield ("store", name), state._replace(host=state.host | 1 << u), times, 0
            if on_host and not on_device:
                start_s = max(clocks.compute, clocks.in_, clocks.whole[u])
                end_s = start_s + self.host.latency_s + self.size[u] * self.host.in_s_per_byte
                times = clocks._replace(
                    in_=end_s,
                    ready=_set(clocks.ready, u, end_s),
                    busy=_set(clocks.busy, u, end_s),
                    host_busy=_set(clocks.host_busy, u, max(clocks.host_busy[u], end_s)),
                )
                back = self.members[u] & ~state.lost & self._made(state.done)
                live = state.live | back
                yield ("fetch", name), state._replace(live=live), times, self.device_bytes(live)
            if on_host:
                times = clocks._replace(
                    free=max(clocks.free, clocks.host_busy[u]),
                    whole=_set(clocks.whole, u, 0.0),
                    host_busy=_set(clocks.host_busy, u, 0.0),
                )
                yield ("drop", name), state._replace(host=state.host & ~(1 << u)), times, 0

    def _disk_copies(
        self, disk: HostLink, state: State, clocks: Clocks
    ) -> Iterator[tuple[tuple[str, str], State, Clocks, int]]:
        for u, name in enumerate(self.roots):
            on_host, on_disk, bit = state.host >> u & 1, state.disk >> u & 1, 1 << u
            if on_host and not on_disk:
                start_s = max(clocks.compute, clocks.spill, clocks.whole[u], clocks.disk_free)
                end_s = start_s + disk.latency_s + self.size[u] * disk.out_s_per_byte
                times = clocks._replace(
                    spill=end_s,
                    host_busy=_set(clocks.host_busy, u, max(clocks.host_busy[u], end_s)),
                    kept=_set(clocks.kept, u, end_s),
                    disk_busy=_set(clocks.disk_busy, u, end_s),
                )
                yield ("spill", name), state._replace(disk=state.disk | bit), times, 0
            if on_disk and not on_host:
                start_s = max(clocks.compute, clocks.load, clocks.kept[u], clocks.free)
                end_s = start_s + disk.latency_s + self.size[u] * disk.in_s_per_byte
                times = clocks._replace(
                    load=end_s,
                    whole=_set(clocks.whole, u, end_s),
                    host_busy=_set(clocks.host_busy, u, end_s),
                    disk_busy=_set(clocks.disk_busy, u, max(clocks.disk_busy[u], end_s)),
                )
                yield ("load", name), state._replace(host=state.host | bit), times, 0
            if on_disk:
                times = clocks._replace(
                    disk_free=max(clocks.disk_free, clocks.disk_busy[u]),
                    kept=_set(clocks.kept, u, 0.0),
                    disk_busy=_set(clocks.disk_busy, u, 0.0),
                )
                yield ("delete", name), state._replace(disk=state.disk & ~bit), times, 0

    def _made(self, done: int) -> int:
        mask = 0
        for outputs in self.outputs[:done]:
            mask |= outputs
        return mask

    def _compute(
        self, p: int, state: State, clocks: Clocks
    ) -> Iterator[tuple[tuple[str, str], State, Clocks, int]]:
        node, live, again = self.graph.nodes[p], state.live, p < state.done
        if again and not (node.phase == "forward" and node.recomputable):
            return
        if self.inputs[p] & ~live or any(not live & self.members[u] for u in self.alias_needs[p]):
            return
        if again and not self._may_repeat(p, live):
            return
        over = self.over[p]
        if over is not None and (state.host | state.disk) >> over & 1:
            return
        start_s = max([clocks.compute, *(clocks.ready[u] for u in self.reads[p])])
        if self.graph.host_state_bytes and node.phase == "optimizer":
            start_s = max(start_s, _end_s(clocks))
        times = clocks._replace(compute=start_s + node.time_s)
        made_bytes = sum(self.size[u] for u in self.made_roots[p])
        peak_bytes = self.device_bytes(live) + made_bytes + node.workspace_bytes
        for u in self.made_roots[p]:
            if live & self.bit[self.roots[u]]:
                times = self._leave(u, times)
        lost = state.lost
        if over is not None:
            lost |= self.members[over] & self._made(state.done) & ~self.outputs[p]
        done = state.done + (not again)
        after = State(done, live | self.outputs[p], state.host, lost, state.disk)
        yield ("compute", node.name), after, times, peak_bytes

    def _may_repeat(self, p: int, live: int) -> bool:
        if self.outputs[p] & ~live == 0:
            return False
        for u in self.made_roots[p]:
            holders, own = self.members[u] & live, self.bit[self.roots[u]]
            if holders and (not holders & own or holders & ~self.outputs[p]):
                return False
        return True
