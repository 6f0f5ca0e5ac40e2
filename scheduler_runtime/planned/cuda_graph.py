"""A planned step as CUDA graphs: the host hands over one launch in place of thousands.

PyTorch records forward and backward as two graphs that share a pool of memory
(`torch.cuda.make_graphed_callables`); every later call copies its batch to where the recorded one
stood. What that asks for is checked:

- One CUDA device, and tensors that stay where they are: a parameter or buffer that is replaced (not
  written) after the recording would not be seen, so it is refused; so is a batch on the host.
- Shapes that do not change: each kind of call is recorded by itself. All recordings of a module
  share one pool of memory, so that the largest step is what they take.
- Gradients that are None before each step: the recording writes a step's gradients to where it
  wrote those of the step before, and `.grad` would be that very memory. So accumulation is refused.
- One forward pass, then its backward pass: a second forward pass writes over what the first one
  kept, so the backward pass of the first is refused.
- Random numbers: an operator that runs once draws from the device's generator, which graphs know to
  advance. To run one again its generator's state has to be put back, which reads it on the host:
  that cannot be recorded, so such a plan is refused. A plan that keeps what random operators make
  is the way out.

The loss (any output of one number) is copied out of the recording; other outputs stand in its
memory until the next step writes over them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.calls import Call, nested
from scheduler_runtime.execute import recompute_random, run_and_keep_state
from scheduler_runtime.planned.program_cache import BoundProgram


class CudaGraphError(ValueError):
    """The step cannot be recorded as a CUDA graph, or not be replayed; says why."""


def check_model(model: nn.Module) -> None:
    """Raise CudaGraphError where nothing can be recorded."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if {device.type for device in devices} != {"cuda"} or len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "no device"
        raise CudaGraphError(
            f"cuda_graph=True needs a model on one CUDA device; this one is on {where}"
        )


def check_call(call: Call, device: torch.device) -> None:
    """Raise CudaGraphError for a batch whose copies to the device could not be recorded."""
    for index, tensor in enumerate(call.tensors):
        if tensor.device != device:
            raise CudaGraphError(
                f"tensor {index} of the batch is on {tensor.device}, the model on {device}: what a "
                "recorded step reads must be there; move the batch before the call"
            )


def check_program(compiled: BoundProgram) -> None:
    """Raise CudaGraphError where the program puts a generator's state back."""
    pieces = (compiled.program.forward, *compiled.program.backward)
    random = [
        node.args[0]
        for piece in pieces
        for node in piece.module.graph.nodes
        if node.op == "call_function" and node.target in (recompute_random, run_and_keep_state)
    ]
    if random:
        names = ", ".join(sorted({str(target) for target in random}))
        raise CudaGraphError(
            f"the plan runs {names} again, with the random numbers of their first run; that reads "
            "the generator's state on the host, which a CUDA graph cannot. Give a larger budget, "
            "or apply the plan without cuda_graph"
        )


class Recordings:
    """What the recordings of one module share: memory, the stream they are made on, and whose turn
    it is.

    n_forward: forward passes that were replayed. open: the number of the one whose backward pass
    may come (None: it has).
    """

    def __init__(self) -> None:
        self.n_forward = 0
        self.open: int | None = None
        self._pool: Any = None
        self._stream: Any = None

    @contextlib.contextmanager
    def recording_on(self, device: torch.device) -> Iterator[Any]:
        """The pool to record into; autocast is off, as the program has its casts in it.

        PyTorch records on one stream of the process, that of the device where it recorded first;
        and memory of a pool is used again on the stream alone that it was taken on. So recordings
        of a module have a stream of their own, on its device.
        """
        gc.collect()  # what is freed while something is recorded would end the recording
        graph: Any = torch.cuda.graph
        with torch.cuda.device(device), torch._C._DisableAutocast():
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()
            before = graph.default_capture_stream
            graph.default_capture_stream = self._stream
            try:
                yield self._pool
            finally:
                graph.default_capture_stream = before

    def begin(self) -> None:
        self.n_forward += 1
        self.open = self.n_forward

    def end(self, number: int) -> None:
        """Refuse a backward pass whose forward pass is no longer what stands in the memory."""
        if self.open == number:
            self.open = None
            return
        reason = (
            "its backward pass ran already"
            if number == self.n_forward
            else "another forward pass ran since, and wrote over what it kept"
        )
        raise CudaGraphError(
            f"a recorded step is one forward pass, then its backward pass: {reason}. Call backward "
            "once, before the next forward pass, or apply the plan without cuda_graph"
        )


class Recorded:
    """A compiled step whose forward and backward are replayed."""

    def __init__(
        self, compiled: BoundProgram, model: nn.Module, call: Call, recordings: Recordings
    ) -> None:
        check_model(model)
        check_program(compiled)
        device = next(model.parameters()).device
        check_call(call, device)
        self._compiled = compiled
        self._recordings = recordings
        self._addresses = _addresses(model)
        self._step = _Step(compiled, model, call)
        # Later batches are copied over the recorded one: it must not be the caller's own.
        samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors)
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        try:
            with (
                recordings.recording_on(device) as pool,
                torch.random.fork_rng(devices=[device]),
            ):
                self._replay = torch.cuda.make_graphed_callables(
                    self._step, samples, allow_unused_input=True, pool=pool
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CudaGraphError(
                f"the step cannot be recorded: {error}; apply the plan without cuda_graph"
            ) from error
        finally:
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
        self._recordings.begin()
        made: Any = self._replay(*call.tensors)
        step = self._step
        tensors = _Handed.apply(self._recordings, len(made), *made, *step.others)
        flat = list(step.plain)
        for position, tensor in zip((*step.planned, *step.unplanned), tensors, strict=True):
            flat[position] = tensor
        return nested.unflatten(flat, step.spec)


class _Step(nn.Module):
    """What is recorded: flat tensors in; out, those outputs alone that a gradient is planned for.

    Those would be handed gradients by the recording, and zeros of their size by autograd. The
    others' memory is read after a replay. spec, plain: the output's form, and what is no tensor in
    it. planned, unplanned: positions of its tensors; others: those of `unplanned`.
    """

    def __init__(self, compiled: BoundProgram, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._compiled = [compiled]
        self._call = [call]
        self.planned = compiled.gradient_outputs
        self.unplanned: tuple[int, ...] = ()
        self.others: tuple[torch.Tensor, ...] = ()
        self.plain: list[Any] = []
        self.spec: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = Call(list(tensors), self._call[0].rest, self._call[0].spec)
        flat, self.spec = nested.flatten(self._compiled[0].run(self.model, call))
        at = [index for index, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        self.unplanned = tuple(index for index in at if index not in self.planned)
        self.others = tuple(flat[index].detach() for index in self.unplanned)
        self.plain = [None if index in at else item for index, item in enumerate(flat)]
        return tuple(flat[index] for index in self.planned)


class _Handed(torch.autograd.Function):
    """Hands the outputs out: n_planned of them, then those that no gradient may arrive for."""

    @staticmethod
    def forward(ctx: Any, recordings: Recordings, n_planned: int, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.recordings, ctx.n_planned, ctx.number = recordings, n_planned, recordings.n_forward
        return tuple(t.clone() if t.numel() == 1 else t.detach() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if any(gradient is not None for gradient in gradients[ctx.n_planned :]):
            raise RuntimeError(
                "a gradient arrives for an output that the plan expects none for: only the planned "
                "loss may be differentiated"
            )
        ctx.recordings.end(ctx.number)
        return (None, None, *gradients)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
