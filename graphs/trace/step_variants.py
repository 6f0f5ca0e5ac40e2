"""A captured step and its variants: the same program with different rewrites or costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from graphs.capture import Capture, Layout, Rehearsed
from graphs.costs import CostModel
from graphs.graph import Graph
from graphs.rewrites import Variant, program_with, rewrites_program
from graphs.trace.captured_graph import as_rehearsed


@dataclass(frozen=True)
class CapturedStep:
    """The captured program and its graph: what `apply` needs to run a schedule.

    captured: the traced program, after the rewrites.
    original: the program as it was traced.
    layout: its nodes and tensors.
    graph: the graph of the module's step.
    _extract: makes the captured step of a program, with these rewrites and costs.
    _rehearsed: what eager mode holds and overwrites, recorded in the graphs of all variants (None:
        not known).
    """

    captured: Capture
    layout: Layout
    graph: Graph
    original: Capture = field(repr=False)
    _costs: CostModel | None = field(repr=False)
    _extract: Callable[[Capture, Variant, CostModel | None], CapturedStep] = field(repr=False)
    _rehearsed: Rehearsed | None = field(default=None, repr=False)

    def with_rewrites(self, rewrites: Iterable[str]) -> CapturedStep:
        """Another variant of the same step, without tracing again."""
        wanted = tuple(rewrites)
        if wanted == tuple(self.graph.meta.rewrites):
            return self
        return self._variant(program_with(self.original, wanted), wanted, self._costs)

    def with_costs(self, costs: CostModel | None) -> CapturedStep:
        """The same step with other seconds and workspace, without tracing again."""
        return self._variant(self.captured, tuple(self.graph.meta.rewrites), costs)

    def variants(self, wanted: Iterable[Variant]) -> list[CapturedStep]:
        """The plain step, and those of the wanted variants whose rewrites change the program."""
        steps = [self.with_rewrites(())]
        for variant in dict.fromkeys(wanted):
            program = program_with(self.original, variant)
            changes_program = program is not self.original or not rewrites_program(variant)
            if variant and changes_program:
                steps.append(self._variant(program, variant, self._costs))
        return steps

    def as_rehearsed(self, rehearsed: Rehearsed) -> CapturedStep:
        """The same step, with what eager mode holds and overwrites recorded in its graphs."""
        graph = as_rehearsed(self.graph, rehearsed)
        return replace(self, graph=graph, _rehearsed=rehearsed)

    def _variant(self, program: Capture, variant: Variant, costs: CostModel | None) -> CapturedStep:
        step = self._extract(program, variant, costs)
        return step if self._rehearsed is None else step.as_rehearsed(self._rehearsed)
