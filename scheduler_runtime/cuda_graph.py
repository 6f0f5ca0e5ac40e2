"""A planned step as CUDA graphs: the host hands over one launch in place of thousands.

PyTorch records forward and backward as two graphs that share a pool of memory
(`torch.cuda.make_graphed_callables`); every later call copies its batch to where the recorded one
stood. What that asks for is checked before:

- One CUDA device, and tensors that stay where they are: a parameter or buffer that is replaced (not
  written) after the recording would not be seen, so it is refused.
- Shapes that do not change: each kind of call is recorded by itself.
- Gradients that are None before each step: the recording writes a step's gradients to where it
  wrote those of the step before, and `.grad` would be that very memory. So accumulation is refused.
- Random numbers: an operator that runs once draws from the device's generator, which graphs know to
  advance. To run one again its generator's state has to be put back, which reads it on the host:
  that cannot be recorded, so such a plan is refused. A plan that keeps what random operators make
  is the way out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphs import nested
from graphs.call import Call
from scheduler_runtime.compiled import Compiled
from scheduler_runtime.random_state import run_again, run_and_keep_state


class CudaGraphError(ValueError):
    """The step cannot be recorded as a CUDA graph; says why."""


def check_model(model: nn.Module) -> None:
    """Raise CudaGraphError where nothing can be recorded."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if {device.type for device in devices} != {"cuda"} or len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "no device"
        raise CudaGraphError(
            f"cuda_graph=True needs a model on one CUDA device; this one is on {where}"
        )


def check_program(compiled: Compiled) -> None:
    """Raise CudaGraphError where the program puts a generator's state back."""
    pieces = (compiled.program.forward, *compiled.program.backward)
    random = [
        node.args[0]
        for piece in pieces
        for node in piece.module.graph.nodes
        if node.op == "call_function" and node.target in (run_again, run_and_keep_state)
    ]
    if random:
        names = ", ".join(sorted({str(target) for target in random}))
        raise CudaGraphError(
            f"the plan runs {names} again, with the random numbers of their first run; that reads "
            "the generator's state on the host, which a CUDA graph cannot. Give a larger budget, "
            "or apply the plan without cuda_graph"
        )


class Recorded:
    """A compiled step whose forward and backward are replayed."""

    def __init__(self, compiled: Compiled, model: nn.Module, call: Call) -> None:
        check_model(model)
        check_program(compiled)
        self._compiled = compiled
        self._spec: Any = None
        self._addresses = _addresses(model)
        step = _Step(self, model, call)
        # Later batches are copied over the recorded one: it must not be the caller's own.
        samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors)
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device]):
            self._replay = torch.cuda.make_graphed_callables(step, samples, allow_unused_input=True)
        with torch.no_grad():  # the steps that warm it up and record it have changed them
            for buffer, before in buffers:
                buffer.copy_(before)

    def fits(self, model: nn.Module, call: Call) -> bool:
        return self._compiled.fits(model, call)

    def run(self, model: nn.Module, call: Call) -> Any:
        if _addresses(model) != self._addresses:
            raise CudaGraphError(
                "a parameter or buffer stands elsewhere than when the step was recorded; "
                "remove(model) and apply the plan again after replacing them"
            )
        held = next((n for n, p in model.named_parameters() if p.grad is not None), None)
        if held is not None:
            raise CudaGraphError(
                f"parameter {held!r} has a gradient already, and the recorded step writes its "
                "gradients where it wrote those of the step before: call "
                "optimizer.zero_grad(set_to_none=True) before the step, or apply the plan without "
                "cuda_graph to accumulate"
            )
        flat: Any = self._replay(*call.tensors)
        parts = [flat] if isinstance(flat, torch.Tensor) else list(flat)
        return nested.unflatten(parts, self._spec)


class _Step(nn.Module):
    """What is recorded: flat tensors in, flat tensors out."""

    def __init__(self, recorded: Recorded, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._recorded = [recorded]
        self._call = [call]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = Call(list(tensors), self._call[0].rest, self._call[0].spec)
        output = self._recorded[0]._compiled.run(self.model, call)
        flat, spec = nested.flatten(output)
        if not all(isinstance(item, torch.Tensor) for item in flat):
            raise CudaGraphError("the model returns something beside tensors")
        self._recorded[0]._spec = spec
        return tuple(flat)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
