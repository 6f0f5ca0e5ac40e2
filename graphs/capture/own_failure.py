"""Finds out whether a model that cannot be traced would fail anyway, say on a batch of wrong shape.

The model is called once more outside of the trace, on tensors of the meta device, where products
and norms refuse mixtures of dtypes as their kernels do. A failure that is due to tracing does not
occur there, or looks different; so does a failure of code that reads values. If model and batch
have values, the model is also called on those.
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
from graphs.model_calls import Call, TraceError, named_state, strided_like, title_of


class FailsOnBatchError(TraceError):
    """The model's own forward fails for this call, traced or not."""


def refuse_own_failure(model: nn.Module, call: Call, error: TraceError) -> None:
    """Raise FailsOnBatchError if the model itself fails on meta tensors as it did in the trace.

    error: the error of the trace. Nothing is done unless its `runs_in_eager` is set and it has a
        cause, and all parameters, buffers and batch tensors are plain strided tensors.
    """
    own_state = dict(named_state(model))
    tensors = (*own_state.values(), *call.tensors)
    is_plain = all(
        type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        for tensor in tensors
    )
    if not error.runs_in_eager or error.__cause__ is None or not is_plain:
        return
    meta_tensors = {
        id(tensor): strided_like(tensor, "meta").requires_grad_(tensor.requires_grad)
        for tensor in tensors
    }
    args, kwargs = call.arguments([meta_tensors[id(tensor)] for tensor in call.tensors])
    state = {name: meta_tensors[id(tensor)] for name, tensor in own_state.items()}
    untraced_error: Exception | None = None
    try:
        with (
            attributes_unchanged(model),
            objects_unchanged(model),
            torch.device("meta"),
            RefusingMixedDtypes(),
        ):
            torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    except Exception as raised:  # noqa: BLE001 - the model's code may raise anything
        untraced_error = raised
    refuse_same_failure(model, error, untraced_error)


def refuse_same_failure(
    model: nn.Module, error: TraceError, untraced_error: Exception | None
) -> None:
    """Raise FailsOnBatchError if the model alone raises the same error as in the trace.

    untraced_error: what the model has raised outside of the trace, if anything.
    """
    traced_error = error.__cause__
    if isinstance(traced_error, SideEffectError):  # raised by our checks, not by the model
        return
    if untraced_error is not None and (type(untraced_error), str(untraced_error)) == (
        type(traced_error),
        str(traced_error),
    ):
        why = f"{title_of(model)} fails on this batch: {error.short}"
        raise FailsOnBatchError(why, short=error.short) from traced_error


def refuse_failure_on_values(
    model: nn.Module, error: TraceError, run: Callable[[], object]
) -> None:
    """Raise FailsOnBatchError if the model fails on real tensors as it did in the trace.

    Errors are compared by type only: messages may differ, since a trace has no values, and so may
    lines, since a trace assumes that checks pass (`graphs.capture.as_eager.checked_values`). Any
    operator may raise a RuntimeError, so for this type the line in the model must agree too.

    run: calls the model on real tensors.
    """
    traced_error = error.__cause__
    no_values = (DataDependentOutputException, DynamicOutputShapeException)
    if traced_error is None or isinstance(traced_error, (SideEffectError, *no_values)):
        return
    try:
        run()
    except Exception as untraced_error:
        # An operator on tensors without values raises deeper, below the same line of the model.
        is_same = type(untraced_error) is not RuntimeError or _lines(untraced_error)[-1] in _lines(
            traced_error
        )
        if type(untraced_error) is type(traced_error) and is_same:
            why = f"{title_of(model)} fails on this batch: {error.short}"
            for each in (error, traced_error):  # reference cycles with frames, which hold the trace
                traceback.clear_frames(each.__traceback__)
            raise FailsOnBatchError(why, short=error.short) from untraced_error


def _lines(error: BaseException) -> list[tuple[str, int]]:
    """(file, line) of each frame in the error's traceback, the innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in frames]


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames of the error's traceback, the innermost last, then those of its causes."""
    chain: BaseException | None = error
    while chain is not None:
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            yield frame
        chain = chain.__cause__


@contextlib.contextmanager
def failures_not_logged() -> Iterator[None]:
    """While inside, silence the tracebacks that fake tensors log for failing operators.

    They are not needed, since the error is raised too.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(has_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(has_no_traceback)
