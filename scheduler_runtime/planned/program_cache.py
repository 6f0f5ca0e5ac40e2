"""The programs of a planned module: one for each kind of call, and only so many of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import torch
from torch import fx, nn

from graphs.calls import Call, nested
from graphs.capture import leaves_of, sharing
from graphs.trace import CapturedStep
from scheduler_runtime.execute import Program, run_step
from scheduler_runtime.planned.guards import (
    Records,
    argument_state,
    modules_of,
    settings_of,
    torchs_settings,
)

N_KEPT = 32
"""Programs of a module that are kept; the one that was not used for longest goes first."""


class StepProgram(Protocol):
    """What runs a call: the generated code, or a recording of it."""

    def fits(self, model: nn.Module, call: Call) -> bool: ...

    def run(self, model: nn.Module, call: Call) -> Any: ...


class ProgramCache:
    """Programs by the kind of call that they are for.

    Calls of one kind may still differ in what the module looks at
    (`graphs.capture.as_eager.known_values`): then there are several programs of that kind, and the
    guards of each tell whether it fits.
    """

    def __init__(self, *, n_kept: int = N_KEPT) -> None:
        self._n_kept = n_kept
        self._programs: OrderedDict[tuple[Any, int], StepProgram] = OrderedDict()
        self.n_added = 0

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, key: Any, model: nn.Module, call: Call) -> StepProgram | None:
        """The program that was made for such a call, if it is still there."""
        for name, compiled in reversed(self._programs.items()):
            if name[0] == key and compiled.fits(model, call):
                self._programs.move_to_end(name)
                return compiled
        return None

    def add(self, key: Any, compiled: StepProgram) -> None:
        self.n_added += 1
        self._programs[key, self.n_added] = compiled
        while len(self._programs) > self._n_kept:
            self._programs.popitem(last=False)


class BoundProgram:
    """A program and where its tensors come from in the module and the call."""

    def __init__(self, step: CapturedStep, program: Program) -> None:
        self.program = program
        self._guards = step.captured.guards
        self._held = step.captured.held
        self._output_spec = step.captured.output_spec
        self._state: list[tuple[fx.Node, tuple[str, ...]]] = []
        self._inputs: list[tuple[fx.Node, int]] = []
        for node, source in step.captured.sources.items():
            if source.kind in ("parameter", "buffer"):
                self._state.append((node, tuple(source.name.split("."))))
            elif source.kind == "input":
                self._inputs.append((node, source.index))

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
        tensors: dict[fx.Node, torch.Tensor]
        tensors = {node: _tensor_at(model, path) for node, path in self._state}
        tensors |= {node: call.tensors[index] for node, index in self._inputs}
        made = iter(run_step(self.program, tensors))
        flat = [self._output(item, tensors, made) for item in self.program.outputs]
        return nested.unflatten(flat, self._output_spec)

    def _output(self, item: Any, tensors: dict[fx.Node, torch.Tensor], made: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        return tensors[item] if item in tensors else next(made)


def _tensor_at(model: nn.Module, path: tuple[str, ...]) -> torch.Tensor:
    """The parameter or buffer of that name; `named_parameters` would walk the whole module."""
    module: Any = model
    for name in path[:-1]:
        module = module._modules[name]
    held = module._parameters if path[-1] in module._parameters else module._buffers
    tensor: torch.Tensor = held[path[-1]]
    return tensor


def kind_of(model: nn.Module, call: Call, records: Records) -> Any:
    """What the traced graph depends on and that may change between calls, but for values."""
    modules = modules_of(model)
    parameters = {
        id(p): p for m in modules for p in m._parameters.values() if p is not None
    }.values()
    buffers = (b for m in modules for b in m._buffers.values() if b is not None)
    device = next((p.device.type for p in parameters), "cpu")
    return (
        tuple(map(_form, call.tensors)),
        sharing(call.tensors) if len(call.tensors) > 1 else (),
        tuple(argument_state(item) for item in call.rest),
        call.spec,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        torchs_settings(),
        tuple(map(_form, parameters)),
        tuple(map(_form, buffers)),
        settings_of(model, records),
    )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad
