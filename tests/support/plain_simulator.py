"""A second implementation of the rules of schedules, as plain as can be: sets, and sums over them.

It is written from the rules alone, to check `solver.simulate`, and in another style: nothing is
updated incrementally, everything is counted anew at each op. The time is a longest path over the
ops, each of which waits for all earlier ops that the rules name. Quadratic; for small graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from graphs.graph import Graph
from solver.schedule import IllegalScheduleError, Places, simulate
from solver.schedule.ops import Compute, Free, Op, Schedule

FROM_TO = {
    "Store": ("device", "host"),
    "Fetch": ("host", "device"),
    "Spill": ("host", "disk"),
    "Load": ("disk", "host"),
}
GIVEN_UP = {"Drop": "host", "Delete": "disk"}


class BrokenRuleError(Exception):
    """The schedule is illegal; the message has the number of the rule and what is wrong."""


@dataclass
class Step:
    """What matters of one op for its start and end times.

    stream: "compute", the kind of a copy, or "none" for the end of a copy.
    copies: (storage, place) of the source and the target of a copy; else empty.
    gives_up: the pairs (storage, place) that the op frees.
    reads: storages that a compute needs on the device.
    alone: the op waits for everything before it (rule 11).
    """

    stream: str
    time_s: float
    copies: tuple[tuple[str, str], ...] = ()
    gives_up: set[tuple[str, str]] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    alone: bool = False


class PlainSimulation(NamedTuple):
    """live_bytes: bytes on the device during each op."""

    time_s: float
    peak_bytes: int
    live_bytes: tuple[int, ...]
    host_peak_bytes: int
    disk_peak_bytes: int


def assert_simulators_agree(graph: Graph, schedule: Schedule, places: Places | None = None) -> bool:
    """Assert that both simulators agree on legality, time and memory of the schedule. Returns
    whether it is legal."""
    try:
        plain = simulate_plainly(graph, schedule, places)
    except BrokenRuleError:
        with pytest.raises(IllegalScheduleError):
            simulate(graph, schedule, places=places or Places())
        return False
    found = simulate(graph, schedule, places=places or Places())
    exact = 0.0 if places is None else 1e-12
    assert found.time_s == pytest.approx(plain.time_s, rel=exact, abs=0)
    assert found.n_recomputed == len(schedule.order) - len(graph.nodes)
    for name in PlainSimulation._fields[1:]:
        assert getattr(found, name) == getattr(plain, name), name
    return True


def simulate_plainly(
    graph: Graph, schedule: Schedule, places: Places | None = None
) -> PlainSimulation:
    """Raises BrokenRuleError if the schedule is illegal."""
    size = {t.name: t.size_bytes for t in graph.tensors}
    root = {t.name: t.alias_of or t.name for t in graph.tensors}
    made_by = {name: node for node in graph.nodes for name in node.outputs}
    resident = {t.name for t in graph.tensors} - set(made_by)
    resident_bytes = sum(size[name] for name in resident if root[name] == name)
    last_run = {op.node: i for i, op in enumerate(schedule.ops) if isinstance(op, Compute)}
    last_fetch = {
        op.storage: i for i, op in enumerate(schedule.ops) if type(op).__name__ == "Fetch"
    }
    by_name = {n.name: n for n in graph.nodes}
    here: set[str] = set()
    away: set[tuple[str, str]] = set()  # (storage, host or disk)
    steps: list[Step] = []
    used = {"host": [0], "disk": [0]}
    gone: set[str] = set()  # tensors that were overwritten
    history: list[str] = []
    curve: list[int] = []

    def held() -> int:
        return resident_bytes + sum(size[r] for r in {root[t] for t in here} if r in made_by)

    for i, op in enumerate(schedule.ops):
        if isinstance(op, Free):
            if op.tensor not in here:
                raise BrokenRuleError("5: not live, or made by no node")
            back = max(last_run[made_by[op.tensor].name], last_fetch.get(root[op.tensor], -1))
            if op.tensor in graph.outputs and back < i:
                raise BrokenRuleError("5: an output that is not recomputed")
            here.remove(op.tensor)
            curve.append(held())
            left = {root[op.tensor]} - {root[t] for t in here}
            steps.append(Step("compute", 0.0, gives_up={(r, "device") for r in left}))
            continue
        if not isinstance(op, Compute):
            if not hasattr(op, "storage") or root.get(op.storage) != op.storage:
                raise BrokenRuleError("7: no storage")
            if op.storage in resident:
                raise BrokenRuleError("7: resident")
            if type(op).__name__ == "Store" and op.storage in {root[t] for t in graph.outputs}:
                raise BrokenRuleError("7: an output")
            if not next(t.copyable for t in graph.tensors if t.name == op.storage):
                raise BrokenRuleError("7: not copyable")
            on_device = {(root[t], "device") for t in here}
            steps.append(_move(op, on_device | away, size[op.storage], places))
            away -= steps[-1].gives_up
            away |= {pair for pair in steps[-1].copies if pair[1] != "device"}
            if type(op).__name__ == "Fetch":
                made = {t for name in history for t in by_name[name].outputs}
                here |= {t for t in made - gone if root[t] == op.storage}
            for place, bytes_there in used.items():
                bytes_there.append(sum(size[s] for s, where in away if where == place))
            curve.append(held())
            continue
        node = by_name.get(op.node)
        if node is None:
            raise BrokenRuleError("no node")
        _check_turn(graph, history, node.name)
        if not set(node.inputs) <= here | resident:
            raise BrokenRuleError("3: an input is missing")
        if set(node.inputs) & gone:
            raise BrokenRuleError("7: an input was overwritten")
        outputs = set(node.outputs)
        for name in outputs:
            is_view = root[name] in made_by and root[name] not in outputs
            if is_view and root[name] not in {root[t] for t in here}:
                raise BrokenRuleError("3: a view of nothing")
        again = node.name in history
        if again and outputs <= here:
            raise BrokenRuleError("3: all outputs are there")
        for name in outputs:
            if again and root[name] == name:
                on_it = {t for t in here if root[t] == name}
                if on_it - outputs or (on_it and name not in on_it):
                    raise BrokenRuleError("3: an alias holds the old storage")
        new = sum(size[name] for name in outputs if root[name] == name)
        curve.append(held() + new + node.workspace_bytes)
        if node.overwrites and root[node.overwrites] in {storage for storage, _ in away}:
            raise BrokenRuleError("9: a copy of what is overwritten")
        makes = {root[t] for t in outputs if root[t] in made_by}
        replaced = {t for t in outputs & here if root[t] == t}
        steps.append(
            Step(
                "compute",
                node.time_s,
                gives_up={(t, "device") for t in replaced},
                reads={root[t] for t in node.inputs} | (makes - outputs),
                alone=graph.host_state_bytes > 0 and node.phase == "optimizer",
            )
        )
        if node.overwrites:
            gone |= {t for t in root if root[t] == root[node.overwrites]}
            if gone & resident:
                raise BrokenRuleError("7: what is resident was overwritten")
        here |= outputs
        gone -= outputs
        history.append(node.name)
    if set(history) != {n.name for n in graph.nodes}:
        raise BrokenRuleError("4: a node has never run")
    if not set(graph.outputs) <= here | resident:
        raise BrokenRuleError("6: an output is missing")
    if set(graph.outputs) & gone:
        raise BrokenRuleError("7: an output was overwritten")
    peak_bytes = max([*curve, resident_bytes])
    host_bytes = graph.host_state_bytes + max(used["host"])
    return PlainSimulation(
        _longest_path(steps), peak_bytes, (*curve,), host_bytes, max(used["disk"])
    )


def _move(op: Op, there: set[tuple[str, str]], size: int, places: Places | None) -> Step:
    """The step of a copy, or of the op that gives a copy up.

    there: (storage, place) for every place where a storage is.
    """
    kind, storage = type(op).__name__, op.storage
    if kind in GIVEN_UP:
        pair = (storage, GIVEN_UP[kind])
        if pair not in there:
            raise BrokenRuleError("7: nothing to give up")
        return Step("none", 0.0, gives_up={pair})
    if kind not in FROM_TO:
        raise BrokenRuleError("no op")
    source, target = ((storage, place) for place in FROM_TO[kind])
    if source not in there or target in there:
        raise BrokenRuleError("7: not at the source, or at the target already")
    place = (places or Places()).disk if "disk" in FROM_TO[kind] else (places or Places()).host
    if place is None:
        raise BrokenRuleError("7: no such place")
    link = place.link
    rate = link.out_bytes_per_s if kind in ("Store", "Spill") else link.in_bytes_per_s
    return Step(kind, link.latency_s + size / rate, copies=(source, target))


def _longest_path(steps: list[Step]) -> float:
    """When the last step ends, if each starts as soon as all that it waits for have ended.

    A step that waits for an op also waits for everything that this op waited for. So where a rule
    names the copies of a storage, all earlier copies of it can be taken.
    """
    end_s: list[float] = []
    for i, step in enumerate(steps):
        # a stream runs its ops in order
        waits_for = {j for j in range(i) if steps[j].stream == step.stream != "none"}
        copies = [j for j in range(i) if steps[j].copies]
        if step.copies:
            source, (_, target) = step.copies
            # a copy waits for earlier computes, for the copy that brought its source, and for the
            # copies of what was given up at its target, whose memory it may reuse
            waits_for |= {j for j in range(i) if steps[j].stream == "compute"}
            waits_for |= {j for j in copies if steps[j].copies[1] == source}
            for drop in (j for j in range(i) if steps[j].stream == "none"):
                for pair in steps[drop].gives_up:
                    if pair[1] == target:
                        waits_for |= {j for j in copies if j < drop and pair in steps[j].copies}
        # a compute waits for the fetches of what it reads
        waits_for |= {
            j for j in copies if steps[j].stream == "Fetch" and steps[j].copies[1][0] in step.reads
        }
        if step.alone:
            waits_for |= {*range(i)}
        start_s = max((end_s[j] for j in waits_for), default=0.0)
        end = start_s + step.time_s
        if step.stream == "compute":  # freeing a storage waits for its copies
            end = max(
                [end, *(end_s[j] for j in copies if step.gives_up.intersection(steps[j].copies))]
            )
        end_s.append(end)
    return max(end_s, default=0.0)


def _check_turn(graph: Graph, history: list[str], name: str) -> None:
    """Rule 4: first runs come in graph order; only recomputable forward nodes are recomputed."""
    names = [n.name for n in graph.nodes]
    node = graph.nodes[names.index(name)]
    if name in history:
        if node.phase != "forward" or not node.recomputable:
            raise BrokenRuleError("4: runs once")
    elif set(history) != set(names[: names.index(name)]):
        raise BrokenRuleError("4: out of order")
