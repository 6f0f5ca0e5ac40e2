"""The programs of a planned module: one for each kind of call, and only so many of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphs.calls import Call
from scheduler_runtime.execute import StepProgram

N_KEPT = 32


class ProgramCache:
    """Programs by the kind of call that they are for, the one used last at the end.

    Calls of one kind may still differ in the numbers that the module looks at
    (`graphs.capture.as_eager.known_values`): then there are several programs of that kind, and the
    guards of each say whether it fits.
    """

    def __init__(self, *, n_kept: int = N_KEPT) -> None:
        self._n_kept = n_kept
        self.programs: list[tuple[Any, StepProgram]] = []
        self.n_added = 0

    def find(self, kind: Any, model: nn.Module, call: Call) -> StepProgram | None:
        """The program that was made for such a call, if it is still there."""
        for index in range(len(self.programs) - 1, -1, -1):
            planned, program = self.programs[index]
            if planned == kind and program.fits(model, call):
                self.programs.append(self.programs.pop(index))
                return program
        return None

    def add(self, kind: Any, program: StepProgram) -> None:
        """Keep a program; the one that was not used for longest goes."""
        self.n_added += 1
        self.programs.append((kind, program))
        del self.programs[: -self._n_kept]
