"""The cache of a planned module's programs, by the kind of call that each is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from graphs.model_calls import Call
from scheduler_runtime.execute import BoundProgram, Program, StepProgram
from scheduler_runtime.planned.guards import changed_setting


class ProgramCache:
    """Programs by the kind of call that they are for, the most recently used one at the end.

    Calls of one kind may still differ in tensor values that the module reads as numbers
    (`graphs.capture.as_eager.known_values`). Then there are several programs of that kind, and the
    guards of each say whether it fits.

    n_kept: the most programs that are kept.
    """

    def __init__(self, *, n_kept: int) -> None:
        self._n_kept = n_kept
        self.programs: list[tuple[Any, StepProgram]] = []
        self.n_added = 0

    def find(self, kind: Any, model: nn.Module, call: Call) -> StepProgram | None:
        """The program for this call, if there is one; it becomes the most recently used."""
        for index in range(len(self.programs) - 1, -1, -1):
            planned, program = self.programs[index]
            if planned == kind and program.fits(model, call):
                self.programs.append(self.programs.pop(index))
                return program
        return None

    def describe_change(self, kind: Any, model: nn.Module) -> str | None:
        """Describe what has changed since the last program for calls with the same arguments.

        None: nothing has, or there is no such program.
        """
        of_call, _ = kind
        for (planned, _), _program in reversed(self.programs):
            if len(planned) == len(of_call) and planned[:4] == of_call[:4]:
                return changed_setting(planned, of_call, model)
        return None

    def call_kinds(self) -> Iterator[Any]:
        """The `kind_of` of the calls that programs are kept for."""
        return (of_call for (of_call, _), _program in self.programs)

    def add(self, kind: Any, program: StepProgram, *, other_kind: Any = None) -> None:
        """Keep a program; if there are too many, drop the least recently used one.

        other_kind: another kind of call that the program is for.
        """
        self.n_added += 1
        self.programs += [(each, program) for each in (other_kind, kind) if each is not None]
        while len({id(program) for _, program in self.programs}) > self._n_kept:
            del self.programs[0]

    def remedy(self) -> str:
        """How to need fewer programs, judging by the last one."""
        *others, (kind, program) = self.programs
        read = program.read_from if isinstance(program, BoundProgram) else ()
        if read and any(other == kind for other, _ in others):
            return (
                f"forward reads values of {', '.join(read)} (int(), .item(), `if`), and needs a "
                "new plan where they change: compute with the tensor instead (index_copy_ at "
                "torch.arange(n) + position, torch.where)"
            )
        if isinstance(program, BoundProgram) and program.is_chance:
            return (
                "forward skips layers at random (LayerDrop), and each choice of layers needs a "
                "plan of its own: set layerdrop=0, or multiply by a random mask"
            )
        if isinstance(program, BoundProgram) and program.sets_after_reading:
            names = ", ".join(map(repr, program.sets_after_reading))
            return (
                f"forward reads {names} as the call before has left it, and then sets it: each "
                "pair of old and new values needs a plan of its own. Use a local variable, or set "
                "it before it is read"
            )
        return (
            "shapes, arguments or attributes that change with every step need a new plan every "
            "step: pad the shapes, or pass the value as a tensor"
        )

    def drop_all(self, programs: Sequence[Program]) -> None:
        """Drop these programs: the next calls of their kinds need new ones."""
        for _, each in tuple(self.programs):
            if isinstance(each, BoundProgram) and any(each.program is one for one in programs):
                self.drop(each)

    def drop(self, program: StepProgram) -> None:
        """Drop this program: the next call of its kind needs a new one."""
        self.programs = [each for each in self.programs if each[1] is not program]
