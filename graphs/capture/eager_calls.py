"""The operators that run in eager mode on fake tensors, and when their storages are freed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs import OpCall


@dataclass(frozen=True)
class EagerCall:
    """index: of all calls. storages: what it makes, or writes where it makes nothing."""

    name: str
    index: int
    storages: tuple[int, ...]
    overwrites: bool


class EagerCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers calls and the storages that they make, while entered.

    freed: storage -> how many calls had run when it was freed.
    written: storage -> the calls that wrote into it after it was made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.freed: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.n_calls = self._n_storages = 0
        self._number: dict[int, int] = {}  # address of a live storage -> its number

    def noted(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any
    ) -> EagerCall | None:
        """A call that has run; None if it is a view, or makes and writes nothing."""
        call = OpCall(target=func, args=args, kwargs=dict(kwargs), value=value)
        if not call.outputs() or call.is_view():
            return None
        known = {item.untyped_storage()._cdata for item in call.inputs()}
        written = call.mutated()
        outputs = {item.untyped_storage()._cdata: item for item in call.outputs()}
        made = [item.untyped_storage() for at, item in outputs.items() if at not in known]
        storages = tuple(
            map(self._numbered, made or [next(iter(outputs.values())).untyped_storage()])
        )
        for item in written:
            if (number := self._number.get(item.untyped_storage()._cdata)) is not None:
                self.written.setdefault(number, []).append(self.n_calls)
        self.n_calls += 1
        overwrites = bool(written) and not made
        return EagerCall(packet(str(func)), self.n_calls - 1, storages, overwrites)

    def _numbered(self, storage: torch.UntypedStorage) -> int:
        at = storage._cdata
        if at not in self._number:
            self._number[at] = self._n_storages
            self._n_storages += 1
            weakref.finalize(storage, self._drop, at).atexit = False
        return self._number[at]

    def _drop(self, at: int) -> None:
        self.freed[self._number.pop(at)] = self.n_calls


def packet(operator: str) -> str:
    """ "aten.mul" of aten.mul.Tensor and of aten.mul_.Scalar."""
    return operator.rpartition(".")[0].rstrip("_")
