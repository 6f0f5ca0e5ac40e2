"""Learn how many forward passes of a fitted module wait for a backward pass at the same time.

A step ends with the last call before a backward pass begins; the next call begins another step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from graphs.graph import warn
from scheduler_runtime.execute import Program
from scheduler_runtime.fitting.options import Options
from scheduler_runtime.planned import PassesInFlight
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_both, tell


class InFlight:
    """The passes in flight of one fitted module.

    n: number of passes for which steps are planned now.
    """

    def __init__(self, options: Options) -> None:
        self.n = options.passes or 1
        self._copies_to_host = options.host_budget is not None  # such plans are for a single pass
        self.passes = PassesInFlight()
        self._has_warned = False  # whether it has warned since `n` was last changed

    def is_next_step(self) -> bool:
        """Whether a call begins a new step. If so, `n` becomes the most passes that a step had."""
        passes = self.passes
        begins = passes.has_backward_begun or not passes.waiting
        passes.has_backward_begun = False
        if begins and passes.n_most_waiting > self.n and not self._copies_to_host:
            tell(
                f"{passes.n_most_waiting} forward passes wait for one backward pass: planning "
                "again for all of them"
            )
            self.n, self._has_warned = passes.n_most_waiting, False
        return begins

    @property
    def others_bytes(self) -> int:
        """The most that each of the other passes in flight holds, by the plans so far; the other
        passes may be of another kind of call."""
        found = (p.saved_bytes for p in self.passes.plans if 1 < p.n == self.n)
        return max(found, default=0)

    def is_outgrown(self, solution: Solution) -> bool:
        """Whether a plan has too little room for what other passes hold by now.

        Its kind of call is then planned again, without a warning."""
        graph, simulation = solution.graph, solution.simulation
        if graph.n_in_flight == 1 or simulation is None:
            return False
        return max(simulation.saved_bytes, graph.others_bytes) < self.others_bytes

    def record_output(self, output: object, model: nn.Module) -> Sequence[Program]:
        """Record that a call has returned this output; warn if the passes may exceed the budget.

        Returns the programs that must be planned again, since other passes hold more than was
        counted for them."""
        if not self.passes.add(output):
            return ()
        above_bytes, waiting = self.passes.above_bytes(), self.passes.waiting
        if not above_bytes:
            return ()
        is_more = len(waiting) > self.n
        if not (is_more and self._has_warned):
            why = _OF_ONE if self._copies_to_host else _OF_FEWER if is_more else _OF_OTHERS
            warn(
                f"fit: {len(waiting)} forward passes of {type(model).__name__} wait for a backward "
                "pass together, and this step may take up to "
                f"{format_both(above_bytes)} more than the budget: {why}"
            )
        if is_more:  # the next step is planned for more passes, so as another kind of call
            self._has_warned = True
            return ()
        all_bytes = sum(planned.saved_bytes for _, planned in waiting)
        return [
            program
            for program, planned in waiting
            if planned.above_bytes(all_bytes - planned.saved_bytes)
        ]


_OF_ONE = (
    "plans that copy to the host are for one pass: leave out host_budget=, or concatenate the "
    "batches and call the model once"
)
_OF_FEWER = (
    "the plan is for fewer. The next step is planned for all of them; give passes= to avoid this"
)
_OF_OTHERS = (
    "they were planned beside other passes in flight that save less for backward. The next step is "
    "planned again; call the model with the largest batch first to avoid this"
)
