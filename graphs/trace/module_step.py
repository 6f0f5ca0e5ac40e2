"""Traces a module into the graph of its own step, without optimizer and loss of the caller.

The result is a `CapturedStep`, which gives other variants of the step without tracing again.
`graphs.capture.joint_graph` records the module on fake tensors, `graphs.capture.extraction` folds
views into their storages, `graphs.costs.models` gives the cost of each operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphs.capture import (
    Capture,
    Layout,
    Planned,
    Rehearsed,
    capture,
    extract,
    one_at_a_time,
    rehearse,
)
from graphs.costs import CostModel, NodeCosts
from graphs.graph import Graph
from graphs.model_calls import Call, LayoutForShapes, find_loss, nested
from graphs.rewrites import (
    Variant,
    program_with,
    rewrites_program,
    rewritten,
    with_writes_in_place,
)
from graphs.trace.captured_graph import as_rehearsed, captured_graph
from graphs.trace.traced_device import refuse_unsupported_device


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


@one_at_a_time
def trace_module(
    model: nn.Module,
    call: Call,
    *,
    device: torch.device | None,
    choose: Callable[[Any], tuple[int, ...]],
    gradients: str,
    costs: CostModel | None,
    rewrites: Iterable[str] = (),
    opaque: Planned = (),
    known: Capture | None = None,
    gradient_layouts: Mapping[int, LayoutForShapes] | None = None,
) -> CapturedStep:
    """Trace the module alone, without a loss outside of it and without optimizer.

    device: the device of the step; None: the model's.
    choose: picks, from the model's output, the indices of the flat outputs that get gradients.
    gradients: as in `GraphMeta.gradients`.
    costs: None: every operator costs nothing.
    rewrites: the rewrites to apply.
    opaque: the parts to run as one piece, from the environment of a plan for this step.
    known: the traced program, if there is one already (`KeptCapture`).
    gradient_layouts: index of an output -> layout of its gradient, where it differs from the
        output's.
    """
    if device is not None:
        refuse_unsupported_device(device)
    captured = known
    if captured is None:
        captured = capture(
            model,
            call,
            device=device,
            choose=choose,
            planned=opaque,
            gradient_layouts=gradient_layouts,
        )
    original, form = captured, call.without_values()  # the step outlives the batch
    model_reference = weakref.ref(model)  # and the model

    def extract_step(program: Capture, variant: Variant, costs: CostModel | None) -> CapturedStep:
        cost = NodeCosts(costs)
        program = with_writes_in_place(program, variant)
        layout = rewritten(extract(program, cost=cost), variant)
        model = model_reference()
        if model is None:
            raise ReferenceError("the model of this step does not exist any more")
        graph = captured_graph(
            model, form, program, layout, variant, device=device, gradients=gradients, cost=cost
        )
        return CapturedStep(program, layout, graph, original, costs, extract_step)

    variant = tuple(rewrites)
    return extract_step(program_with(original, variant), variant, costs)


@one_at_a_time
def rehearsed(
    model: nn.Module, call: Call, step: CapturedStep, *, device: torch.device | None
) -> CapturedStep:
    """The step with what eager mode holds and overwrites recorded, which the baseline needs.

    The model runs once more for this, on fake tensors (`graphs.capture.rehearse`).

    model, call, device: those that the step was traced with.
    """
    plain = step.with_rewrites(())
    return step.as_rehearsed(rehearse(model, call, plain.captured, plain.layout, device=device))


def loss_index(output: Any) -> tuple[int, ...]:
    """The index of the loss among the flat outputs of a model that returns it, as a tuple."""
    loss = find_loss(output)
    flat = nested.leaves(output)
    return (next(index for index, item in enumerate(flat) if item is loss),)
