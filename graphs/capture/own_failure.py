"""Whether a model that cannot be traced fails by itself: a batch of a wrong shape, say.

It is called once more on tensors of the meta device, outside of the trace, where products and norms
refuse mixtures of dtypes as kernels do. What only a trace cannot do fails there in another way, or
not at all; so does what reads values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import nn

from graphs.capture.refuse import RefusingMixedDtypes, SideEffectError, attributes_unchanged
from graphs.model_calls import Call, TraceError, named_state, strided_like


class FailsOnBatchError(TraceError):
    """The model's own forward fails for this call, traced or not."""


def refuse_own_failure(model: nn.Module, call: Call, error: TraceError) -> None:
    """Raise FailsOnBatchError where the error of the trace is that of the model itself."""
    traced = error.__cause__
    if not error.runs_in_eager or traced is None or not _is_plain(model, call):
        return
    refuse_same_failure(model, error, _failure(model, call))


def refuse_same_failure(model: nn.Module, error: TraceError, alone: Exception | None) -> None:
    """Raise FailsOnBatchError where the model alone has raised what ended the trace."""
    traced = error.__cause__
    if isinstance(traced, SideEffectError):  # ours: the model alone runs
        return
    if alone is not None and (type(alone), str(alone)) == (type(traced), str(traced)):
        why = f"{type(model).__name__} fails on this batch: {error.short}"
        raise FailsOnBatchError(why, short=error.short) from traced


def _failure(model: nn.Module, call: Call) -> Exception | None:
    """What the forward pass raises on the meta device; None: nothing."""
    own = dict(named_state(model))
    meta = {
        id(tensor): strided_like(tensor, "meta").requires_grad_(tensor.requires_grad)
        for tensor in (*own.values(), *call.tensors)
    }
    args, kwargs = call.arguments([meta[id(tensor)] for tensor in call.tensors])
    state = {name: meta[id(tensor)] for name, tensor in own.items()}
    try:
        with attributes_unchanged(model), torch.device("meta"), RefusingMixedDtypes():
            torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    except Exception as error:  # noqa: BLE001 - the model's code may raise anything
        return error
    return None


def _is_plain(model: nn.Module, call: Call) -> bool:
    tensors = (*model.parameters(), *model.buffers(), *call.tensors)
    return all(
        type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        for tensor in tensors
    )


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
