"""The rules of a schedule once more, as plainly as can be: sets, and sums over them.

Written from the rules alone and in another style than `solver.simulate`, which it checks: nothing
is kept up to date, everything is counted again at each op. Quadratic, for small graphs.
"""

from __future__ import annotations

from graphs.graph import Graph
from solver.schedule.ops import Compute, Schedule


class FoulError(Exception):
    """The schedule is illegal; the message is the rule's number."""


def play(graph: Graph, schedule: Schedule) -> tuple[float, int, tuple[int, ...]]:
    """Seconds, peak bytes and the bytes during each op; raises FoulError."""
    size = {t.name: t.size_bytes for t in graph.tensors}
    root = {t.name: t.alias_of or t.name for t in graph.tensors}
    made_by = {name: node for node in graph.nodes for name in node.outputs}
    resident = {t.name for t in graph.tensors} - set(made_by)
    resident_bytes = sum(size[name] for name in resident if root[name] == name)
    last_run = {op.node: i for i, op in enumerate(schedule.ops) if isinstance(op, Compute)}
    here: set[str] = set()
    gone: set[str] = set()  # overwritten: there, but not what it was
    history: list[str] = []
    curve: list[int] = []

    def held() -> int:
        return resident_bytes + sum(size[r] for r in {root[t] for t in here} if r in made_by)

    for i, op in enumerate(schedule.ops):
        if not isinstance(op, Compute):
            if op.tensor not in here:
                raise FoulError("5: not live, or made by no node")
            if op.tensor in graph.outputs and last_run[made_by[op.tensor].name] < i:
                raise FoulError("5: an output that is not recomputed")
            here.remove(op.tensor)
            curve.append(held())
            continue
        node = {n.name: n for n in graph.nodes}.get(op.node)
        if node is None:
            raise FoulError("no node")
        _check_turn(graph, history, node.name)
        if not set(node.inputs) <= here | resident:
            raise FoulError("3: an input is missing")
        if set(node.inputs) & gone:
            raise FoulError("7: an input was overwritten")
        outputs = set(node.outputs)
        for name in outputs:
            is_view = root[name] in made_by and root[name] not in outputs
            if is_view and root[name] not in {root[t] for t in here}:
                raise FoulError("3: a view of nothing")
        again = node.name in history
        if again and outputs <= here:
            raise FoulError("3: all outputs are there")
        for name in outputs:
            if again and root[name] == name:
                on_it = {t for t in here if root[t] == name}
                if on_it - outputs or (on_it and name not in on_it):
                    raise FoulError("3: an alias holds the old storage")
        new = sum(size[name] for name in outputs if root[name] == name)
        curve.append(held() + new + node.workspace_bytes)
        if node.overwrites:
            gone |= {t for t in root if root[t] == root[node.overwrites]}
            if gone & resident:
                raise FoulError("7: what is resident was overwritten")
        here |= outputs
        gone -= outputs
        history.append(node.name)
    if set(history) != {n.name for n in graph.nodes}:
        raise FoulError("4: a node has never run")
    if not set(graph.outputs) <= here | resident:
        raise FoulError("6: an output is missing")
    if set(graph.outputs) & gone:
        raise FoulError("7: an output was overwritten")
    by_name = {n.name: n for n in graph.nodes}
    return sum(by_name[name].time_s for name in history), max([*curve, resident_bytes]), (*curve,)


def _check_turn(graph: Graph, history: list[str], name: str) -> None:
    """Rule 4: first runs come in graph order; only recomputable forward nodes are recomputed."""
    names = [n.name for n in graph.nodes]
    node = graph.nodes[names.index(name)]
    if name in history:
        if node.phase != "forward" or not node.recomputable:
            raise FoulError("4: runs once")
    elif set(history) != set(names[: names.index(name)]):
        raise FoulError("4: out of order")
