"""What eager mode's backward functions overwrite, and drop before they return.

A traced function of the backward pass is a list of functional operators. Its code in C++ may work
in place (`sigmoid(x).sub_(target).mul_(grad)`), and drops what an expression has computed where the
expression ends. That is in no graph, and only the code knows it. So the step runs once on fake
tensors, in eager mode, and each function's calls are compared with its traced operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.extraction import Layout
from graphs.costs import OpCall

N_AHEAD = 8
"""Functions to look ahead for the next traced one: some have no operators left in the trace."""


@dataclass(frozen=True)
class Rehearsed:
    """in_place: backward nodes that overwrite their first input in eager mode.

    dropped: tensor that a backward function makes -> the node of it after which it is dropped,
        where that is not the last.
    """

    in_place: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _EagerCall:
    """index: of all calls. storages: what it makes, or writes where it makes nothing."""

    name: str
    index: int
    storages: tuple[int, ...]
    overwrites: bool


class BackwardCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, records the operators that functions of autograd run, views left out.

    functions: the calls of each, in the order in which they run.
    freed: storage -> how many calls had run when it was freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.functions: list[list[_EagerCall]] = []
        self.freed: dict[int, int] = {}
        self._n_calls = self._n_storages = 0
        self._function: int | None = None
        self._number: dict[int, int] = {}  # address of a live storage -> its number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        if node is None or not call.outputs() or call.is_view():
            return value
        known = {item.untyped_storage()._cdata for item in call.inputs()}
        written = call.mutated()
        outputs = {item.untyped_storage()._cdata: item for item in call.outputs()}
        made = [item.untyped_storage() for at, item in outputs.items() if at not in known]
        storages = tuple(
            map(self._numbered, made or [next(iter(outputs.values())).untyped_storage()])
        )
        if (number := node._sequence_nr()) != self._function:
            self._function = number
            self.functions.append([])
        self.functions[-1].append(
            _EagerCall(_packet(str(func)), self._n_calls, storages, bool(written) and not made)
        )
        self._n_calls += 1
        return value

    def _numbered(self, storage: torch.UntypedStorage) -> int:
        at = storage._cdata
        if at not in self._number:
            self._number[at] = self._n_storages
            self._n_storages += 1
            weakref.finalize(storage, self._drop, at).atexit = False
        return self._number[at]

    def _drop(self, at: int) -> None:
        self.freed[self._number.pop(at)] = self._n_calls


def has_temporaries(layout: Layout) -> bool:
    """Whether a backward function reads what it has made itself."""
    function_of = {name: at for at, each in layout.functions.items() for name in each}
    maker = {out: node.name for node in layout.nodes for out in node.outputs}
    return any(
        name in maker and function_of.get(maker[name], -1) == function_of[node.name]
        for node in layout.nodes
        if node.name in function_of
        for name in node.inputs
    )


def compared(layout: Layout, calls: BackwardCalls) -> Rehearsed:
    """The functions of the trace that run the same operators in eager mode."""
    in_place: list[str] = []
    dropped: dict[str, str] = {}
    outputs = {node.name: node.outputs for node in layout.nodes}
    op = {node.name: _packet(node.op) for node in layout.nodes}
    for members, function in _matched(list(layout.functions.values()), calls.functions, op):
        for name, call in zip(members, function, strict=True):
            if call.overwrites:
                in_place.append(name)
            for out, storage in zip(outputs[name], call.storages, strict=False):
                freed = calls.freed.get(storage, calls._n_calls)
                held = [m for m, each in zip(members, function, strict=True) if each.index < freed]
                if held[-1] != members[-1]:
                    dropped[out] = held[-1]
    return Rehearsed(tuple(in_place), dropped)


def _matched(
    traced: Sequence[Sequence[str]], eager: Sequence[Sequence[_EagerCall]], op: Mapping[str, str]
) -> Iterator[tuple[Sequence[str], Sequence[_EagerCall]]]:
    """Both in order. Functions without a counterpart are left out."""
    start = 0
    for members in traced:
        wanted = [op[name] for name in members]
        for at, function in enumerate(islice(eager, start, start + N_AHEAD), start):
            if wanted == [call.name for call in function]:
                yield members, function
                start = at + 1
                break


def _packet(operator: str) -> str:
    """ "aten.mul" of aten.mul.Tensor and of aten.mul_.Scalar."""
    return operator.rpartition(".")[0].rstrip("_")
