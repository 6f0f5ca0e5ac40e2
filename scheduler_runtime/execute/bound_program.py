"""A program, and where its tensors come from in the module and the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from graphs.calls import Call, nested
from graphs.capture import leaves_of
from graphs.trace import CapturedStep
from scheduler_runtime.execute.again import Again, Other, Place, can_run_again
from scheduler_runtime.execute.autograd import run_step
from scheduler_runtime.execute.program import Program


class BoundProgram:
    """Runs a program with the tensors of a module and a call.

    other: where other outputs may get a gradient than planned, the program for these (None: an
        error).
    """

    def __init__(self, step: CapturedStep, program: Program, *, other: Other | None = None) -> None:
        self.program = program
        self._other = other if can_run_again(step.captured) else None
        self._written = tuple(step.captured.mutations)
        self._positions = tuple(
            at
            for at, item in enumerate(program.outputs)
            if isinstance(item, fx.Node) and item not in step.captured.sources
        )
        self._guards = step.captured.guards
        self._held = step.captured.held
        self._output_spec = step.captured.output_spec
        self._places: dict[fx.Node, Place] = {}
        for node, source in step.captured.sources.items():
            if source.kind in ("parameter", "buffer"):
                self._places[node] = tuple(source.name.split("."))
            elif source.kind == "input":
                self._places[node] = source.index

    @property
    def gradient_outputs(self) -> tuple[int, ...]:
        """Positions of the flat outputs that a gradient is planned for."""
        planned = {self.program.made_outputs[index] for index, _ in self.program.tangents}
        outputs = enumerate(self.program.outputs)
        return tuple(at for at, item in outputs if isinstance(item, fx.Node) and item in planned)

    def fits(self, model: nn.Module, call: Call) -> bool:
        """Whether the module would see in this call what it saw when it was traced."""
        if not all(held.holds(model) for held in self._held):
            return False
        if not self._guards:
            return True
        leaves = leaves_of(model, call)
        return all(guard.holds(leaves) for guard in self._guards)

    def run(self, model: nn.Module, call: Call) -> Any:
        tensors = {
            node: call.tensors[place] if isinstance(place, int) else _tensor_at(model, place)
            for node, place in self._places.items()
        }
        again = None
        if self._other is not None:
            again = Again(
                self._other,
                call,
                tensors,
                places=self._places,
                written=self._written,
                positions=self._positions,
            )
        return self._run(tensors, again)

    def run_on(self, tensors: Mapping[Place, torch.Tensor]) -> Any:
        """The output for these tensors. Other gradients than planned for are an error."""
        return self._run({node: tensors[place] for node, place in self._places.items()}, None)

    def _run(self, tensors: Mapping[fx.Node, torch.Tensor], again: Again | None) -> Any:
        made = iter(run_step(self.program, tensors, again=again))
        flat = list(self.program.outputs)  # plain constants stay
        for index, item in enumerate(flat):
            if isinstance(item, fx.Node):  # a tensor that was handed in, or made
                flat[index] = tensors[item] if item in tensors else next(made)
        return nested.unflatten(flat, self._output_spec)


def _tensor_at(model: nn.Module, path: tuple[str, ...]) -> torch.Tensor:
    """The parameter or buffer of that name; `named_parameters` would walk the whole module."""
    module: Any = model
    for name in path[:-1]:
        module = module._modules[name]
    held = module._parameters if path[-1] in module._parameters else module._buffers
    tensor: torch.Tensor = held[path[-1]]
    return tensor
