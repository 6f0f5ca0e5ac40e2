"""Traces a step whose forward sets attributes: retries with them set, or takes what they hold.

Attributes that every call sets to the same value are set beforehand (`graphs.capture.filled_once`);
tensors that a call computes and leaves in attributes become outputs (`graphs.capture.left_behind`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from graphs.capture.as_eager import eager_branches, no_cache, refuse_fast_path
from graphs.capture.checkpoints import call_checkpoints_directly
from graphs.capture.filled_once import (
    FilledAttribute,
    SetBeforeRead,
    attributes_filled,
    find_filled_attributes,
)
from graphs.capture.left_behind import LeftAttribute, LeftBehind, left_set, with_is_unread
from graphs.capture.opaque import StandIn
from graphs.capture.own_failure import failures_not_logged
from graphs.capture.refuse import (
    LeftTensorsError,
    attributes_unchanged,
    refuse_forwards_with_state,
    refuse_hooks,
)
from graphs.capture.refused_trace import as_trace_error
from graphs.capture.same_steps import StepRecorder, are_same_steps
from graphs.capture.shell import Shell
from graphs.model_calls import Call, TraceError, autograd_functions, nested, title_of

_R = TypeVar("_R")


def with_attributes(
    model: nn.Module,
    call: Call,
    device: torch.device | None,
    run: Callable[[LeftBehind | None], _R],
    stand_ins: Sequence[StandIn],
) -> tuple[_R, tuple[FilledAttribute, ...], tuple[LeftAttribute, ...]]:
    """Call `run`, which traces; if it fails since forward sets attributes, retry.

    run: gets what takes the tensors that forward leaves in attributes (None: this is refused).
    Returns its result, the attributes that each call sets to the same value, and those in which it
    leaves tensors. Raises TraceError.
    """
    try:
        result, filled = _with_filled_attributes(model, call, device, lambda: run(None), stand_ins)
        return result, filled, ()
    except TraceError as error:
        # Opaque parts run the module's own code, so that what they read is not seen.
        if stand_ins or not isinstance(error.__cause__, LeftTensorsError):
            raise
        left = LeftBehind(model)
        try:
            result = run(left)
            found = _left_attributes(model, call, device)
        except TraceError:
            found = None
        left.values = []
        if found is None:
            raise
    return result, (), found


def _left_attributes(
    model: nn.Module, call: Call, device: torch.device | None
) -> tuple[LeftAttribute, ...] | None:
    """The attributes in which forward leaves tensors; None if later calls may use these.

    Later steps do not use what forward leaves in an attribute that it sets before it reads it, or
    in a buffer whose new value has a graph: the old value is an input of the step. They use no
    attribute at all if the output of a next call has the graph of what this one has left: in eager
    mode, a backward pass would go through that graph a second time, so that a training loop resets
    the state.
    """
    left = LeftBehind(model)
    shell = forward_shell(model, call, device, (), left=left)
    plain = _recorded(shell)
    found, values = left.left, left.values
    watch = SetBeforeRead(model, [each.place for each in found if each.kind == "attribute"])
    again = _recorded(forward_shell(model, call, device, (), left=LeftBehind(model)), watch=watch)
    found = with_is_unread(found, watch.unread if are_same_steps(plain, again) else ())
    others = [(a, value) for a, value in zip(found, values, strict=True) if not a.is_unread]
    state = [t.grad_fn for _, value in others for t in nested.tensors(value) if t.grad_fn]
    is_reset = False
    with (
        contextlib.suppress(TraceError),  # a call may fail on what an earlier one has left
        trace_context(model, ()),
        left_set(model, others),
        attributes_unchanged(model),
        shell.mode,
        torch.enable_grad(),
    ):
        output = shell.call(shell.batch)
        is_reset = not {*state}.isdisjoint(autograd_functions(nested.tensors(output)))

    def is_input(attribute: LeftAttribute, value: object) -> bool:
        return attribute.kind == "buffer" and any(t.requires_grad for t in nested.tensors(value))

    return found if is_reset or all(is_input(*each) for each in others) else None


def _with_filled_attributes(
    model: nn.Module,
    call: Call,
    device: torch.device | None,
    run: Callable[[], _R],
    stand_ins: Sequence[StandIn],
) -> tuple[_R, tuple[FilledAttribute, ...]]:
    """Call `run`, which traces; if it fails, retry with the attributes set that a call fills.

    Returns its result, and these attributes (`graphs.capture.filled_once`). Raises TraceError if
    both fail, if a call fills no attributes, or if the call that fills them differs from later
    ones.
    """
    try:
        return run(), ()
    except TraceError:
        shell = forward_shell(model, call, device, stand_ins)
        first = StepRecorder(shell)
        filled: tuple[FilledAttribute, ...] = ()
        with contextlib.suppress(TraceError), trace_context(model, stand_ins):
            filled = find_filled_attributes(model, shell.mode, first.run)
        if not filled:
            raise
    with attributes_filled(model, filled):
        result = run()
        # A second call, which finds the attributes filled, must run the first one's operators.
        later = _recorded(forward_shell(model, call, device, stand_ins))
        # A third call finds out which attributes forward sets before it reads them.
        plain = [(each.module, each.attribute) for each in filled if each.is_plain]
        watch = SetBeforeRead(model, plain)
        again: StepRecorder | None = None
        with contextlib.suppress(TraceError):
            again = _recorded(forward_shell(model, call, device, stand_ins), watch=watch)
    if not are_same_steps(first, later):
        where, attribute = filled[0].module or title_of(model), filled[0].attribute
        raise TraceError(
            f"the first call of {title_of(model)} fills the attribute {attribute!r} of "
            f"{where!r} and computes something else than later calls; a plan is for one fixed "
            "sequence of operators. Call the model once before it is planned, or fill the "
            "attribute in __init__"
        )
    # Not known with opaque parts: the attributes that they read were not seen.
    if stand_ins or again is None or not are_same_steps(later, again):
        return result, filled
    places = watch.unread
    return result, tuple(
        replace(each, is_unread=(each.module, each.attribute) in places) for each in filled
    )


def _recorded(shell: Shell, *, watch: SetBeforeRead | None = None) -> StepRecorder:
    """Record a step of the shell's model, watched if asked for. Raises TraceError."""
    recorder, model = StepRecorder(shell), shell.model
    with (
        trace_context(model, shell.stand_ins),
        attributes_unchanged(model),
        watch or contextlib.nullcontext(),
        shell.mode,
    ):
        recorder.run()
    return recorder


def forward_shell(
    model: nn.Module,
    call: Call,
    device: torch.device | None,
    stand_ins: Sequence[StandIn],
    *,
    left: LeftBehind | None = None,
) -> Shell:
    """A shell for a forward pass alone: no output gets a gradient."""
    return Shell(
        model, call, choose=lambda _output: (), device=device, stand_ins=stand_ins, left=left
    )


@contextlib.contextmanager
def trace_context(model: nn.Module, stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Prepare a call of the model on fake tensors, and turn errors inside into TraceErrors.

    Each such TraceError says where in the user's code the error arose.

    stand_ins: stand-ins for the opaque parts, whose hooks need not be refused.
    """
    with (
        failures_not_logged(),
        eager_branches(),
        refuse_fast_path(),
        no_cache(model),
        call_checkpoints_directly(),
    ):
        refuse_forwards_with_state(model)
        try:
            refuse_hooks(model, except_in=[each.module for each in stand_ins])
            yield
        except TraceError:
            raise
        except Exception as error:
            raise as_trace_error(model, error) from error
