"""A traced program for a call that has come before, in another situation."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphs.capture import Capture
from graphs.model_calls import Call
from scheduler_runtime.execute import BoundProgram
from scheduler_runtime.fitting.tighter_plans import Ladder
from scheduler_runtime.planned import ProgramCache


def known_program(
    programs: ProgramCache, kind: Any, model: nn.Module, call: Call
) -> Capture | None:
    """Of a call of the same kind with other gradients before the step; None: there is none.

    kind: of the call, as the keys of `programs`: what a trace depends on, and the situation.
    """
    here, (_, _, reached, _) = kind
    for (of_it, (_, _, of_it_reached, _)), program in programs.programs:
        if of_it == here and of_it_reached == reached and program.fits(model, call):
            own = program.program() if isinstance(program, Ladder) else program
            assert isinstance(own, BoundProgram)
            captured = own.captured
            # a first call fills attributes, and parts that are not traced were measured: anew
            return None if captured.filled or captured.opaque else captured
    return None
