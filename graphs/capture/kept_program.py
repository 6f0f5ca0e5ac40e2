"""Keeps the program that `solve` has traced for an `apply` in the same process."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from graphs.capture.captured_step import Capture
from graphs.capture.joint_graph import describe_step
from graphs.capture.same_program import StepDescription
from graphs.capture.shell import leaves_of
from graphs.model_calls import Call, TraceError, device_of


class KeptCapture:
    """A captured program, with a description that tells whether a call would be traced to it again.

    It does not keep the module, its parameters or the batch alive. It is not copied or pickled with
    the object that holds it; a step of the copy is traced again.
    """

    def __init__(self, model: nn.Module, captured: Capture, description: StepDescription) -> None:
        self._model = weakref.ref(model)
        self._captured = captured
        self._description = description

    @classmethod
    def of(
        cls, model: nn.Module, call: Call, captured: Capture, *, device: torch.device
    ) -> KeptCapture | None:
        """Keep a captured program; None if it cannot be recognised.

        That is so with opaque parts and with attributes that calls fill, if the program is
        for another device than the model's, or if the step fails in eager mode on fake tensors.
        """
        if captured.opaque or captured.filled or captured.left or device_of(model) != device:
            return None
        gradient_outputs = captured.gradient_outputs
        try:
            description = describe_step(
                model, call, gradient_outputs=gradient_outputs, device=device
            )
        except (TraceError, RuntimeError):  # what can be traced need not run in eager mode
            return None
        return cls(model, captured, description)

    def captured_for(self, model: nn.Module, call: Call) -> Capture | None:
        """The program, if a trace of this call of this module would make the same one."""
        captured = self._captured
        if self._model() is not model or not all(held.holds(model) for held in captured.held):
            return None
        leaves = leaves_of(model, call)
        try:
            if not all(guard.holds(leaves) for guard in captured.guards):
                return None
            gradient_outputs = captured.gradient_outputs
            description = describe_step(
                model, call, gradient_outputs=gradient_outputs, device=device_of(model)
            )
        except (TraceError, KeyError, RuntimeError):  # the trace will say what is wrong
            return None
        return captured if description == self._description else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in a copy: None
