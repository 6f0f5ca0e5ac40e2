"""Track the forward passes of a planned module that wait for their backward pass at the same time.

A pass waits from the return of its forward until the first gradient of its outputs arrives, or
until its outputs are freed. While it waits, it holds what its plan saves for backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import Graph
from graphs.model_calls import nested
from graphs.passes import passes_of
from graphs.pipeline import pipeline_of
from scheduler_runtime.execute import Program, program_of_output
from solver.schedule import Solution


def n_planned_passes(environment: Mapping[str, Any]) -> int:
    """How many passes in flight a plan with this environment has room for."""
    place = pipeline_of(environment)
    return passes_of(environment).n if place is None else place.n_in_flight


@dataclass(frozen=True)
class PlannedPass:
    """What is planned for the passes of one program.

    n: planned number of passes in flight.
    saved_bytes: what each pass holds while it waits.
    others_bytes: what is planned for all other passes in flight together.
    peak_bytes: planned peak, `others_bytes` included.
    available_bytes: the budget after the reserve.
    gradient_bytes: gradients that several passes hold but that are not counted for one pass.
    """

    n: int
    saved_bytes: int
    others_bytes: int
    peak_bytes: int
    available_bytes: int
    gradient_bytes: int

    @classmethod
    def of(
        cls,
        graph: Graph,
        *,
        n: int,
        saved_bytes: int,
        peak_bytes: int,
        available_bytes: int,
        least_bytes: int = 0,
    ) -> PlannedPass:
        """graph: the graph of the step or of the module's part.
        least_bytes: what is counted at least for each other pass (`Graph.others_bytes`)."""
        computed = (graph.tensor_by_name[name] for name in graph.outputs if name in graph.producer)
        gradient_bytes = sum(tensor.size_bytes for tensor in computed if tensor.kind == "gradient")
        return cls(
            n=n,
            saved_bytes=saved_bytes,
            others_bytes=(n - 1) * max(saved_bytes, least_bytes),
            peak_bytes=peak_bytes,
            available_bytes=available_bytes,
            gradient_bytes=gradient_bytes if n == 1 else 0,
        )

    @classmethod
    def of_solution(cls, solution: Solution) -> PlannedPass:
        """solution: with a schedule."""
        assert solution.simulation is not None
        return cls.of(
            solution.graph,
            n=n_planned_passes(solution.environment),
            saved_bytes=solution.simulation.saved_bytes,
            peak_bytes=solution.simulation.peak_bytes,
            available_bytes=solution.request.available_bytes,
            least_bytes=solution.graph.others_bytes,
        )

    def above_bytes(self, others_bytes: int) -> int:
        """Bytes above the budget if the other passes in flight hold this much; 0: it is kept."""
        more_bytes = max(0, others_bytes - self.others_bytes)
        if others_bytes:  # autograd holds the sum of the gradients while a pass makes its own
            more_bytes += max(0, self.gradient_bytes - self.saved_bytes)
        return max(0, self.peak_bytes + more_bytes - self.available_bytes)


class PassesInFlight:
    """The passes in flight of one planned module.

    n_most_waiting: the most passes that were waiting when a backward pass began. Passes whose
        outputs were dropped before do not count.
    has_backward_begun: whether one has begun since the caller has set this to False.
    """

    def __init__(self) -> None:
        self._plans: dict[int, PlannedPass] = {}  # by the id of a program that still exists
        self._waiting: dict[weakref.ref[Any], Program] = {}
        self.n_most_waiting = 1
        self.has_backward_begun = False

    def plan(self, program: Program, planned: PlannedPass) -> None:
        """Set what is planned for the passes of this program."""
        self._plans[id(program)] = planned
        weakref.finalize(program, self._plans.pop, id(program), None).atexit = False

    @property
    def plans(self) -> list[PlannedPass]:
        """What is planned for each program that still exists."""
        return list(self._plans.values())

    @property
    def waiting(self) -> list[tuple[Program, PlannedPass]]:
        """The programs of the passes that wait, with what is planned for them; oldest first."""
        programs = list(self._waiting.values())
        return [(each, self._plans[id(each)]) for each in programs if id(each) in self._plans]

    def add(self, output: Any) -> bool:
        """Record that a forward pass has returned this output.

        Returns whether the pass waits for a backward pass: its output is a planned program's.
        """
        planned_outputs = [t for t in nested.tensors(output) if program_of_output(t) is not None]
        if not planned_outputs:
            return False
        function: Any = planned_outputs[0].grad_fn
        program = program_of_output(planned_outputs[0])
        assert program is not None
        waiting = self._waiting

        def forget(which: weakref.ref[Any]) -> None:  # its graph was freed without a backward pass
            waiting.pop(which, None)

        pending = weakref.ref(function, forget)
        reference = weakref.ref(self)

        def on_backward(_gradients: tuple[Any, ...]) -> None:
            if (passes := reference()) is not None:
                passes.has_backward_begun = True
                passes.n_most_waiting = max(passes.n_most_waiting, len(waiting))
            waiting.pop(pending, None)

        waiting[pending] = program
        function.register_prehook(on_backward)
        return True

    def above_bytes(self) -> int:
        """Bytes by which the waiting passes together may exceed the budget; 0: they do not."""
        found = [planned for _, planned in self.waiting]
        all_bytes = sum(each.saved_bytes for each in found)
        return max((each.above_bytes(all_bytes - each.saved_bytes) for each in found), default=0)
