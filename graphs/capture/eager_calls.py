"""Records the operators that run in eager mode on fake tensors, and when storages are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs import OpCall
from graphs.model_calls import storage_key

_Traced = TypeVar("_Traced")
_Eager = TypeVar("_Eager")


@dataclass(frozen=True)
class EagerCall:
    """An operator call in eager mode.

    name: the operator without its overload ("aten.mul").
    operator: its full name ("aten.mul_.Tensor").
    module: path of the module that is running.
    index: position among all calls.
    storages: numbers of the storages that it allocates; if none, of the one that it writes.
    places: the position of each of these storages among the call's results.
    overwrites: whether it writes into an argument and allocates nothing.
    function: sequence number of the autograd function that makes the call (None: forward pass).
    is_random: whether it draws random numbers.
    """

    name: str
    operator: str
    module: str
    index: int
    storages: tuple[int, ...]
    places: tuple[int, ...]
    overwrites: bool
    function: int | None
    is_random: bool


class EagerCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, records operator calls (except views) and numbers their storages.

    calls: the calls, in order.
    freed: number of a storage -> how many calls had run when it was freed.
    written: number of a storage -> indices of the calls that wrote into it after it was allocated.
    read: number of a storage -> indices of the calls that had it as an argument.
    size_bytes: number of a storage -> its bytes.

    running: gives the path of the module that is running.
    """

    def __init__(self, running: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        self.calls: list[EagerCall] = []
        self.freed: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.read: dict[int, list[int]] = {}
        self.size_bytes: dict[int, int] = {}
        self._n_storages = 0
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        call = OpCall(target=func, args=args, kwargs=kwargs or {}, value=value)
        if not call.outputs() or call.is_view():
            return value
        input_storages = {storage_key(item) for item in call.inputs()}
        outputs = {storage_key(item): item for item in call.outputs()}
        # an operator leaves out gradients that are not asked for (None)
        results = value if isinstance(value, list | tuple) else (value,)
        place_of = {
            storage_key(item): place
            for place, item in enumerate(results)
            if isinstance(item, torch.Tensor)
        }
        # An operator in place makes nothing: its call stands for the storage that it writes.
        allocated = [
            item.untyped_storage()
            for address, item in outputs.items()
            if address not in input_storages
        ]
        for read in self.numbers_of(call.inputs()):
            self.read.setdefault(read, []).append(len(self.calls))
        storages = allocated or [next(iter(outputs.values())).untyped_storage()]
        places = tuple(place_of.get(storage._cdata, 0) for storage in storages)
        numbers = tuple(map(self._number_of, storages))
        written = call.mutated()
        for item in written:
            if (number := self._numbers.get(storage_key(item))) is not None:
                self.written.setdefault(number, []).append(len(self.calls))
        node = torch._C._current_autograd_node()
        self.calls.append(
            EagerCall(
                name=operator_name(str(func)),
                operator=str(func),
                module=self._running(),
                index=len(self.calls),
                storages=numbers,
                places=places,
                overwrites=bool(written) and not allocated,
                function=None if node is None else node._sequence_nr(),
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
            )
        )
        return value

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The numbers of the storages of these tensors that are known here."""
        found = {self._numbers.get(storage_key(each)) for each in tensors}
        return {number for number in found if number is not None}

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        if address not in self._numbers:
            self._numbers[address] = self._n_storages
            self.size_bytes[self._n_storages] = storage.nbytes()
            self._n_storages += 1
            weakref.finalize(storage, self._note_freed, address).atexit = False
        return self._numbers[address]

    def _note_freed(self, address: int) -> None:
        self.freed[self._numbers.pop(address)] = len(self.calls)


def operator_name(operator: str) -> str:
    """The operator without overload and trailing "_": "aten.mul" of "aten.mul_.Scalar"."""
    return operator.rpartition(".")[0].rstrip("_")


def matching_pairs(
    traced: Sequence[_Traced],
    eager: Sequence[_Eager],
    are_same: Callable[[_Traced, _Eager], bool],
    *,
    n_look_ahead: int,
) -> Iterator[tuple[_Traced, _Eager]]:
    """Pair traced with eager items in order; items without a counterpart are left out.

    are_same: whether a traced and an eager item belong together.
    n_look_ahead: how many eager items to look ahead for the next traced one.
    """
    start = 0
    for one in traced:
        for at, other in enumerate(islice(eager, start, start + n_look_ahead), start):
            if are_same(one, other):
                yield one, other
                start = at + 1
                break
