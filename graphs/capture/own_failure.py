"""Whether a model that cannot be traced fails by itself: a batch of a wrong shape, say.

It is called once more on tensors of the meta device, outside of the trace, where products and norms
refuse mixtures of dtypes as kernels do. What only a trace cannot do fails there in another way, or
not at all; so does what reads values. Where the values are there, it is called on them.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from graphs.capture.refuse import (
    RefusingMixedDtypes,
    SideEffectError,
    attributes_unchanged,
    objects_unchanged,
)
from graphs.model_calls import Call, TraceError, named_state, strided_like


class FailsOnBatchError(TraceError):
    """The model's own forward fails for this call, traced or not."""


def refuse_own_failure(model: nn.Module, call: Call, error: TraceError) -> None:
    """Raise FailsOnBatchError where the error of the trace is that of the model itself."""
    own = dict(named_state(model))
    tensors = (*own.values(), *call.tensors)
    is_plain = all(
        type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        for tensor in tensors
    )
    if not error.runs_in_eager or error.__cause__ is None or not is_plain:
        return
    meta = {
        id(tensor): strided_like(tensor, "meta").requires_grad_(tensor.requires_grad)
        for tensor in tensors
    }
    args, kwargs = call.arguments([meta[id(tensor)] for tensor in call.tensors])
    state = {name: meta[id(tensor)] for name, tensor in own.items()}
    alone: Exception | None = None
    try:
        with (
            attributes_unchanged(model),
            objects_unchanged(model),
            torch.device("meta"),
            RefusingMixedDtypes(),
        ):
            torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    except Exception as raised:  # noqa: BLE001 - the model's code may raise anything
        alone = raised
    refuse_same_failure(model, error, alone)


def refuse_same_failure(model: nn.Module, error: TraceError, alone: Exception | None) -> None:
    """Raise FailsOnBatchError where the model alone has raised what ended the trace."""
    traced = error.__cause__
    if isinstance(traced, SideEffectError):  # ours: the model alone runs
        return
    if alone is not None and (type(alone), str(alone)) == (type(traced), str(traced)):
        why = f"{type(model).__name__} fails on this batch: {error.short}"
        raise FailsOnBatchError(why, short=error.short) from traced


def refuse_failure_on_values(
    model: nn.Module, error: TraceError, run: Callable[[], object]
) -> None:
    """Raise FailsOnBatchError where the model raises on its values what ended the trace.

    run: calls the model on real tensors. Messages may differ, since a trace has no values, and so
    may lines, since it passes checks (`graphs.capture.as_eager.checked_values`); but any operator
    may raise a RuntimeError.
    """
    traced = error.__cause__
    no_values = (DataDependentOutputException, DynamicOutputShapeException)
    if traced is None or isinstance(traced, (SideEffectError, *no_values)):
        return
    try:
        run()
    except Exception as alone:
        # an operator on tensors without values raises deeper, below the same line of the model
        is_same = type(alone) is not RuntimeError or _lines(alone)[-1] in _lines(traced)
        if type(alone) is type(traced) and is_same:
            why = f"{type(model).__name__} fails on this batch: {error.short}"
            for each in (error, traced):  # in a cycle with its frames, which hold the trace
                traceback.clear_frames(each.__traceback__)
            raise FailsOnBatchError(why, short=error.short) from alone


def _lines(error: BaseException) -> list[tuple[str, int]]:
    """Of the functions that the error has left, the innermost last."""
    passed = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in passed]


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Those that the error has left, the innermost last, and then those of what caused it."""
    chain: BaseException | None = error
    while chain is not None:
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            yield frame
        chain = chain.__cause__


@contextlib.contextmanager
def failures_not_logged() -> Iterator[None]:
    """Without the tracebacks that fake tensors log of failing operators: the error is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
