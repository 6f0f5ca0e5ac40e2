"""Find the traced program of a call that came before, but with other gradients before the step."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphs.capture import Capture
from graphs.model_calls import Call
from scheduler_runtime.fitting.tighter_plans import current_program
from scheduler_runtime.planned import ProgramCache


def known_program(
    programs: ProgramCache, kind: Any, model: nn.Module, call: Call
) -> Capture | None:
    """The traced program of a call that only differs in the gradients that exist before the step.

    kind: the kind of the call, as in the keys of `programs`: what a trace depends on, and the
        situation of the step.

    None: there is no such program, or it cannot be used again.
    """
    here, (_, _, expected_gradients, _) = kind
    for (planned_kind, (_, _, planned_gradients, _)), program in programs.programs:
        if (
            planned_kind == here
            and planned_gradients == expected_gradients
            and program.fits(model, call)
        ):
            captured = current_program(program).captured
            # To be traced again: it fills attributes, which only a first call does, or has untraced
            # parts, which were measured.
            return None if captured.filled or captured.left or captured.opaque else captured
    return None
