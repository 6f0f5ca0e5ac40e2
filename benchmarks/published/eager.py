"""What eager Python adds to a graph: variables that hold tensors, and operators in place.

A graph frees a tensor after its last use. In eager mode a variable of forward holds it until the
variable is assigned again or its function returns.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs import OpCall
from graphs.graph import Graph
from solver.schedule import Compute, Free, Schedule


def in_place(graph: Graph) -> Graph:
    """The graph with the outputs of operators in place on the storage that they overwrite."""
    overwritten = set(graph.meta.eager_overwrites)
    roots = {t.name: t.alias_of or t.name for t in graph.tensors}
    for node in graph.forward_nodes:
        if node.name in overwritten:
            roots[node.outputs[0]] = roots[node.inputs[0]]
    tensors = (
        dataclasses.replace(t, alias_of=None if roots[t.name] == t.name else roots[t.name])
        for t in graph.tensors
    )
    return dataclasses.replace(graph, tensors=tuple(tensors))


def held_by_variables(schedule: Schedule, graph: Graph, until: Mapping[str, int]) -> Schedule:
    """Frees come no earlier than Python drops the tensor.

    until: tensor -> position of the last forward node that runs before it is dropped.
    """
    ops: list[Compute | Free] = []
    waiting: defaultdict[int, list[Free]] = defaultdict(list)
    position = -1
    for op in schedule.ops:
        if isinstance(op, Free) and until.get(op.tensor, -1) > position:
            waiting[until[op.tensor]].append(op)
            continue
        if isinstance(op, Compute):
            ops += waiting.pop(position, ())
            position += 1
        ops.append(op)
    return dataclasses.replace(schedule, ops=tuple(ops))


def dropped_after(module: nn.Module, batch: Sequence[torch.Tensor], graph: Graph) -> dict[str, int]:
    """Run forward on fake tensors: tensor -> position of the last forward node before Python and
    autograd have dropped it. Tensors that outlive forward are left out."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            name: nn.Parameter(mode.from_tensor(p.detach(), static_shapes=True))
            for name, p in module.named_parameters()
        }
        with _Calls() as calls:
            value = torch.func.functional_call(
                module, fake, tuple(mode.from_tensor(each) for each in batch)
            )
        last = dict(calls.last)
        del value
    position_of = dict(_matched(calls.names, graph))
    at = sorted(position_of)
    found = {}
    for call, dropped in last.items():
        if call in position_of:
            node = graph.forward_nodes[position_of[call]]
            ran = [position_of[each] for each in at if each < dropped]
            found.update({name: max(ran) for name in node.outputs[:1]})
    return found


def _matched(names: Sequence[str], graph: Graph) -> Iterator[tuple[int, int]]:
    """Calls of eager mode and the positions of the forward nodes that they are, in order."""
    calls = iter(enumerate(names))
    for position, node in enumerate(graph.forward_nodes):
        packet = node.op.rpartition(".")[0]
        for call, name in calls:
            if name.rstrip("_") == packet.rstrip("_"):
                yield call, position
                break
        else:
            raise ValueError(f"eager mode does not run {node.name} ({node.op})")


class _Calls(TorchDispatchMode):
    """names: operators that ran and are no views. last: index of one -> how many had run when the
    storage that it made was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.last: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        if call.is_view() or not call.outputs():
            return value
        index = len(self.names)
        self.names.append(str(func).rpartition(".")[0])
        known = {item.untyped_storage()._cdata for item in call.inputs()}
        for item in call.outputs()[:1]:
            storage = item.untyped_storage()
            if storage._cdata not in known:
                weakref.finalize(storage, self._drop, index).atexit = False
        return value

    def _drop(self, index: int) -> None:
        self.last[index] = len(self.names)
