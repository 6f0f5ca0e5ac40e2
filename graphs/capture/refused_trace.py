"""Turns the error that ended a trace into a TraceError: what failed, where in the user's code."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from graphs.capture.as_eager import ReadsRandomNumbers
from graphs.capture.refuse import (
    CALL_ORIGINAL,
    COMPILED,
    PairedHooksError,
    SideEffectError,
)
from graphs.model_calls import TraceError, title_of

_READS_VALUES = (
    " (an `if` on a tensor, .item(), int(), indexing by a computed mask), so different steps could "
    "run different operators; a plan is for one fixed sequence. Use torch.where, multiply by a "
    "mask, or branch on values of the batch or of buffers, which forward may read"
)
_READS_RANDOM_NUMBERS = (
    " (.item(), int(), indexing by a random mask), so that each step could run other operators; a "
    "plan is for one fixed sequence. Compute with the tensor itself; to decide by chance, compare "
    "before .item(), as in `if torch.rand([]) < p`; or draw outside of forward and pass the number "
    "with the batch"
)
_NESTED = ", which cannot be recorded; pad to one length and pass a mask instead"
_KEPT_OUTSIDE = (
    " in a global, a closure or an object (a cache; the traces of Pyro), which a plan would not "
    "keep; make it a buffer, or, if the first call alone makes it, begin again and call the model "
    "once before it is planned"
)
_OF_KEPT_TENSORS = ("Unexpected fake buffer", "in tensor_tracker")
"""How PyTorch 2.13, and earlier versions, tell that such a tensor has no values."""
_TORCH = Path(torch.__file__).parent


def as_trace_error(model: nn.Module, error: Exception) -> TraceError:
    """The TraceError for an error that was raised while the model was traced."""
    name, place = title_of(model), _user_line(error)
    if isinstance(error, SideEffectError):
        why = f"{name} cannot be planned{place}: {error}"
        may_checkpoint = not isinstance(error, PairedHooksError)
        return TraceError(why, runs_in_eager=may_checkpoint, short=error.short)
    failure, advice = _failure_and_advice(error)
    why = f"{name} cannot be traced{place}: {failure}{advice}"
    return TraceError(why, runs_in_eager=True, short=f"{failure}{place}")


def _failure_and_advice(error: Exception) -> tuple[str, str]:
    """(what failed, advice)."""
    if isinstance(error, ReadsRandomNumbers):
        return "forward reads random numbers that it draws", _READS_RANDOM_NUMBERS
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return "forward reads values that the step computes", _READS_VALUES
    # The messages of the following errors are about internals of torch. Many calls of torch pass
    # through the file of torch.compile, but an error raised in it is about a compiled function.
    paths = [Path(f.f_code.co_filename) for f, _ in traceback.walk_tb(error.__traceback__)]
    if any(path.is_relative_to(_TORCH / "nested") for path in paths):
        return "forward computes with a nested tensor (torch.nested)", _NESTED
    if paths and paths[-1] == _TORCH / "_dynamo" / "eval_frame.py":
        return COMPILED, CALL_ORIGINAL
    if any(text in str(error) for text in _OF_KEPT_TENSORS):
        return "forward reads a tensor that an earlier call has kept", _KEPT_OUTSIDE
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}", ""


def _user_line(error: Exception) -> str:
    """The innermost line of the user's code in the traceback (" (FILE, line N)"), or ""."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        is_ours = Path(path).is_relative_to(Path(__file__).parents[1])
        is_at_exit = path == contextlib.__file__  # raised by a check after forward had ended
        if "/torch/" not in path and not is_ours and not is_at_exit and not path.startswith("<"):
            place = f" ({path}, line {line})"
    return place
