"""Numbers the calls of `F.cross_entropy` in a trace, so that a planned step can replace one.

`nn.CrossEntropyLoss` calls that function too, and so do the losses of other libraries.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from graphs.capture.traced_calls import annotations_of
from graphs.model_calls import is_distributed

_SIGNATURE = inspect.signature(F.cross_entropy)
_DEFAULTS = {"size_average": None, "reduce": None, "label_smoothing": 0.0}
"""Arguments that a `CalledLoss` does not have, which must have these values."""

_CALL = "cross_entropy_call"
"""Key of the annotation by which an fx node refers to its call (`_LossCall`)."""


@dataclass(frozen=True)
class CalledLoss:
    """The arguments of a cross-entropy with one target class for each row, and no class weights.

    logits: (rows, classes).
    target: (rows,), int64.
    reduction, ignore_index: as in `F.cross_entropy`.
    """

    logits: torch.Tensor
    target: torch.Tensor
    reduction: str
    ignore_index: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CalledLoss | None:
        """Read the arguments of an `F.cross_entropy` call; None if it is of another kind."""
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        logits, target = values["input"], values["target"]
        if any(values[name] != default for name, default in _DEFAULTS.items()):
            return None
        if values["weight"] is not None or is_distributed(logits) or is_distributed(target):
            return None
        if logits.dim() != 2 or target.dtype != torch.int64 or target.dim() != 1:
            return None
        return cls(logits, target, values["reduction"], values["ignore_index"])


class LossCalls(TorchFunctionMode):
    """While entered, passes each `CalledLoss` to a function, which may compute it in another way.

    call: (number of the call, from 0; its arguments; a function that computes the loss as PyTorch
        does) -> the loss. Calls of another kind are not counted.
    """

    def __init__(
        self, call: Callable[[int, CalledLoss, Callable[[], torch.Tensor]], torch.Tensor]
    ) -> None:
        super().__init__()
        self._call = call
        self._n_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        loss = CalledLoss.of(args, kwargs) if func is F.cross_entropy else None
        if loss is None:
            return func(*args, **kwargs)
        self._n_calls += 1
        return self._call(self._n_calls - 1, loss, lambda: func(*args, **kwargs))


@dataclass(eq=False)
class _LossCall:
    """A call of `F.cross_entropy` in a trace.

    number: its number, from 0.
    is_written: whether `forward` writes into the logits after the call.
    """

    number: int
    is_written: bool = False


def called_loss_of(node: fx.Node) -> int | None:
    """The number of the call that a forward or backward node belongs to; None: it is in no call."""
    call: _LossCall | None = annotations_of(node).get(_CALL)
    return None if call is None else call.number


def overwrites_logits(node: fx.Node) -> bool:
    """Whether `forward` writes into the logits after the call that a node belongs to."""
    call: _LossCall | None = annotations_of(node).get(_CALL)
    return call is not None and call.is_written


@contextlib.contextmanager
def annotate_loss_calls() -> Iterator[None]:
    """While inside, annotate the operators of each call with its number.

    On exit, it is recorded whether the logits have been written since the call.
    """
    noted_calls: list[tuple[_LossCall, torch.Tensor, int]] = []

    def note(number: int, loss: CalledLoss, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        call = _LossCall(number)
        if isinstance(loss.logits, FunctionalTensor):  # a rehearsal would see the logits held
            noted_calls.append((call, loss.logits, loss.logits._version))
        with annotate({_CALL: call}):
            return compute()

    with LossCalls(note):
        yield
    for call, logits, version in noted_calls:
        call.is_written = logits._version != version
