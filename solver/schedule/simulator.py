"""The simulator: whether a schedule is legal, its peak, and how long it takes.

Every method's schedule is simulated here; no other code decides what a schedule costs. The
simulator knows the graph and the schedule, and nothing of how the schedule was found. Its rules are
in `solver.schedule.rules`.

Bytes are counted in program order. The target of a copy is occupied from the op that starts the
copy. Bytes are released at `Free`, `Drop` and `Delete`, or by a compute that replaces an output. So
whether a schedule fits does not depend on any times. `solver.schedule.streams` computes how long
it takes.
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate

from graphs.graph import Graph
from solver.schedule.host_and_disk import Link, Place, Places
from solver.schedule.ops import Schedule, other_micro_batch_bytes
from solver.schedule.rules import Device
from solver.schedule.simulation import IllegalScheduleError, Simulation, Stay
from solver.schedule.streams import Event, Streams
from solver.sizes_deadlines_progress import describe_type


def simulate(graph: Graph, schedule: Schedule, *, places: Places | None = None) -> Simulation:
    """Simulate the schedule: its time, peak and bytes on the device.

    places: the host memory and disk that it copies to. Neither their capacities nor a budget are
        checked here: compare `peak_bytes`, `host_peak_bytes` and `disk_peak_bytes`.

    Raises IllegalScheduleError.
    """
    device = _run_schedule(graph, schedule, places=places)
    live_bytes = device.live_bytes
    if graph.n_in_flight > 1:
        others = other_micro_batch_bytes(graph, schedule, device.saved_bytes)
        live_bytes = list(map(operator.add, live_bytes, others))
    peak_bytes = max(live_bytes, default=graph.resident_bytes)
    streams, compute_s = device.streams, math.fsum(device.times_s)
    time_s = compute_s if streams is None else streams.end_s(compute_s)
    copies_bytes = 0 if streams is None else streams.host.peak_bytes
    return Simulation(
        time_s=time_s,
        peak_bytes=max(peak_bytes, graph.resident_bytes),
        peak_op=live_bytes.index(peak_bytes) if live_bytes else None,
        live_bytes=tuple(live_bytes),
        n_recomputed=device.n_recomputed,
        saved_bytes=device.saved_bytes,
        host_peak_bytes=graph.host_state_bytes + copies_bytes,
        disk_peak_bytes=0 if streams is None else streams.disk.peak_bytes,
        stall_s=time_s - compute_s,
        busy_s={} if streams is None else streams.busy_s(),
    )


def simulate_if_legal(
    graph: Graph, schedule: Schedule, *, places: Places | None = None
) -> Simulation | None:
    """As `simulate`; None for an illegal schedule."""
    try:
        return simulate(graph, schedule, places=places)
    except IllegalScheduleError:
        return None


def stays(graph: Graph, schedule: Schedule) -> tuple[Stay, ...]:
    """The storages that the step allocates, and when each is on the device; without resident ones.

    Together with the resident tensors, the workspace of the running op and the other micro-batches
    in flight they add up to `live_bytes`.

    Raises IllegalScheduleError.
    """
    found: list[Stay] = []
    _run_schedule(graph, schedule, places=_ANY_PLACES, stays=found)
    return tuple(found)


def timeline(graph: Graph, schedule: Schedule, *, places: Places | None) -> tuple[Event, ...]:
    """When each compute and each copy starts and ends, in the order of the schedule.

    Raises IllegalScheduleError.
    """
    events: list[Event] = []
    _run_schedule(graph, schedule, places=places, events=events)
    return tuple(events)


def starts_s(
    graph: Graph, schedule: Schedule, *, places: Places | None = None
) -> tuple[float, ...]:
    """When each compute starts, followed by when the step ends; in seconds.

    Raises IllegalScheduleError if the schedule has copies; without copies it is not checked.
    """
    if not schedule.has_copies:
        times_s = (graph.node_by_name[name].time_s for name in schedule.order)
        return tuple(accumulate(times_s, initial=0.0))
    events = timeline(graph, schedule, places=places)
    computes = (event.start_s for event in events if event.stream == "compute")
    return (*computes, max(event.end_s for event in events))


_ANY_PLACES = Places(host=Place(1, Link(1.0, 1.0)), disk=Place(1, Link(1.0, 1.0)))
"""Stand-ins for host and disk when only bytes are asked for: bytes do not depend on the rates."""


def _run_schedule(
    graph: Graph,
    schedule: Schedule,
    *,
    places: Places | None,
    stays: list[Stay] | None = None,
    events: list[Event] | None = None,
) -> Device:
    """Apply all ops to a `Device` and return it; fills the lists `stays` and `events` if given."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"the schedule is {describe_type(schedule)}; it must be a Schedule: "
            "Schedule(ops, graph_id=graph.graph_id)"
        )
    if schedule.graph_id != graph.graph_id:
        raise IllegalScheduleError(
            None,
            f"it was made for another graph (its graph_id is {schedule.graph_id[:19]}…, "
            f"this graph's is {graph.graph_id[:19]}…)",
        )
    streams = Streams(places, events) if schedule.has_copies or events is not None else None
    device = Device(graph, stays, streams)
    for op in schedule.ops:
        device.live_bytes.append(device.run(op))
    device.end()
    return device
