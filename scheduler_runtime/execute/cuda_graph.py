"""A planned step as CUDA graphs: one launch instead of thousands.

PyTorch records forward and backward as two graphs that share a memory pool
(`torch.cuda.make_graphed_callables`); every later call copies its batch into the recorded one's
memory. The preconditions are checked:

- One CUDA device, and tensors at fixed addresses: a parameter or buffer that is replaced (not
  written) after the recording would not be seen, so it is refused; so is a batch on the host.
- Fixed shapes: each kind of call is recorded separately. All recordings of a module share one
  memory pool, so together they take what the largest step takes.
- Gradients that are None before each step: the recording writes a step's gradients to the same
  addresses every time, and `.grad` would be that memory. So accumulation is refused.
- One forward pass, then its backward pass: a second forward pass overwrites what the first one
  saved, so the backward pass of the first is refused.
- Random numbers: an operator that runs once draws from the device's generator, whose state graphs
  advance. To recompute one its generator's state has to be restored, which happens on the host and
  cannot be recorded, so such a plan is refused. Use a plan that keeps the results of random
  operators.
- Outputs with memory of their own: of views among the recorded outputs, autograd would not know
  that a write to one changes the other, so they are refused where they get gradients.

The loss (any output of one number) is copied out of the recording; the memory of other outputs is
overwritten by the next step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphs.capture import OpaqueForward
from graphs.model_calls import Call, is_distributed, nested
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state


class CudaGraphError(ValueError):
    """The step cannot be recorded as a CUDA graph, or not replayed; says why."""


def check_model(model: nn.Module) -> None:
    """Raise CudaGraphError where nothing can be recorded."""
    tensors = (*model.parameters(), *model.buffers())
    if any(map(is_distributed, tensors)):
        raise CudaGraphError(
            "cuda_graph=True with distributed parameters: recording collectives has not been "
            "tried; apply the plan without it"
        )
    devices = {t.device for t in tensors}
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
                f"tensor {index} of the batch is on {tensor.device}, the model on {device}: a "
                "recorded step reads only from its device; move the batch before the call"
            )


def check_program(bound: BoundProgram) -> None:
    """Raise CudaGraphError where the program does on the host what a graph cannot record."""
    if bound.program.pools is not None:
        raise CudaGraphError(
            "the plan copies tensors to host memory, on streams that a recording does not follow; "
            "apply it without cuda_graph, or plan without a host"
        )
    if bound.shares_outputs:
        raise CudaGraphError(
            "outputs of the model that get gradients share memory, and of a recording autograd "
            "would not know it: return clones of them, or apply the plan without cuda_graph"
        )
    if bound.has_checks:
        raise CudaGraphError(
            "forward checks values that the step computes, and raises an error for wrong ones, "
            "which a recording cannot: torch.distributions with validate_args=False does not, or "
            "apply the plan without cuda_graph"
        )
    for piece in (bound.program.forward, *bound.program.backward):
        for node in piece.module.graph.nodes:
            run = getattr(node.target, "__self__", node.target)
            if isinstance(run, OpaqueForward):
                raise CudaGraphError(
                    f"{run.call.path!r} is planned as one piece, which runs in eager mode and may "
                    "wait for values; apply the plan without cuda_graph"
                )
    random = {
        str(node.args[0])
        for piece in (bound.program.forward, *bound.program.backward)
        for node in piece.module.graph.nodes
        if node.op == "call_function" and node.target in (recompute_random, run_and_keep_state)
    }
    if random:
        raise CudaGraphError(
            f"the plan recomputes {', '.join(sorted(random))} with the random numbers of the first "
            "run; that restores the generator's state on the host, which a CUDA graph cannot. Give "
            "a larger budget, or apply the plan without cuda_graph"
        )


class Recordings:
    """What the recordings of one module share: a memory pool, a stream, and whose turn it is.

    n_forward: forward passes replayed so far.
    open: the number of the one whose backward pass is still to come (None: it has run).
    """

    def __init__(self) -> None:
        self.n_forward = 0
        self.open: int | None = None
        self._pool: Any = None
        self._stream: Any = None

    @contextlib.contextmanager
    def recording_on(self, device: torch.device) -> Iterator[Any]:
        """The pool to record into; autocast is off, since the program contains its casts.

        PyTorch records on one stream for the whole process, on the device where it recorded first,
        and a pool reuses memory only on the stream that it was allocated on. So the recordings of a
        module have a stream of their own, on its device.
        """
        gc.collect()  # CUDA memory that is freed during a recording would abort it
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
        """Refuse a backward pass whose forward pass has been overwritten."""
        if self.open == number:
            self.open = None
            return
        reason = (
            "its backward pass ran already"
            if number == self.n_forward
            else "another forward pass ran since and overwrote what it saved"
        )
        raise CudaGraphError(
            f"a recorded step is one forward pass, then its backward pass: {reason}. Call backward "
            "once, before the next forward pass, or apply the plan without cuda_graph"
        )


class Recorded:
    """A program whose forward and backward pass are replayed."""

    def __init__(
        self, bound: BoundProgram, model: nn.Module, call: Call, recordings: Recordings
    ) -> None:
        check_model(model)
        check_program(bound)
        device = next(model.parameters()).device
        check_call(call, device)
        self._bound = bound
        self._recordings = recordings
        self._addresses = _addresses(model)
        self._step = _RecordedStep(bound, model, call)
        # later batches overwrite the recorded one: it must not be the caller's own
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
            with torch.no_grad():  # the warm-up and the recording have changed them
                for buffer, before in buffers:
                    buffer.copy_(before)

    def fits(self, model: nn.Module, call: Call) -> bool:
        return self._bound.fits(model, call)

    def run(self, model: nn.Module, call: Call) -> Any:
        if _addresses(model) != self._addresses:
            raise CudaGraphError(
                "a parameter or buffer is at another address than when the step was recorded; "
                "remove(model) and apply the plan again after replacing it"
            )
        held = next((n for n, p in model.named_parameters() if p.grad is not None), None)
        if held is not None:
            raise CudaGraphError(
                f"parameter {held!r} has a gradient already, and the recorded step overwrites the "
                "gradients of the step before: call "
                "optimizer.zero_grad(set_to_none=True) before the step, or apply the plan without "
                "cuda_graph to accumulate"
            )
        self._recordings.begin()
        made: Any = self._replay(*call.tensors)
        step = self._step
        tensors = _Outputs.apply(self._recordings, len(made), *made, *step.others)
        flat = list(step.plain)
        for position, tensor in zip((*step.planned, *step.unplanned), tensors, strict=True):
            flat[position] = tensor
        return nested.unflatten(nested.in_all_places(flat), step.spec)


class _RecordedStep(nn.Module):
    """What is recorded: flat tensors in, and out only the outputs that a gradient is planned for.

    The recording would expect gradients for all outputs that it returns, and autograd would fill in
    zeros of their size. The others' memory is read after a replay.

    spec, plain: the output's structure, and what in it is not a tensor.
    planned, unplanned: positions of its tensors.
    others: the tensors at the unplanned positions.
    """

    def __init__(self, bound: BoundProgram, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._bound = bound
        self._call = call
        self.planned = bound.gradient_outputs
        self.unplanned: tuple[int, ...] = ()
        self.others: tuple[torch.Tensor, ...] = ()
        self.plain: list[Any] = []
        self.spec: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = Call(list(tensors), self._call.rest, self._call.spec)
        flat, self.spec = nested.flatten(self._bound.run(self.model, call))
        flat = nested.once(flat)
        at = [index for index, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        self.unplanned = tuple(index for index in at if index not in self.planned)
        self.others = tuple(flat[index].detach() for index in self.unplanned)
        self.plain = [None if index in at else item for index, item in enumerate(flat)]
        return tuple(flat[index] for index in self.planned)


class _Outputs(torch.autograd.Function):
    """Returns the outputs to the caller: n_planned of them, then those that take no gradient."""

    @staticmethod
    def forward(ctx: Any, recordings: Recordings, n_planned: int, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.recordings, ctx.n_planned, ctx.number = recordings, n_planned, recordings.n_forward
        return tuple(t.clone() if t.numel() == 1 else t.detach() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if any(gradient is not None for gradient in gradients[ctx.n_planned :]):
            raise RuntimeError(
                "an output that the plan expects no gradient for receives one: only the planned "
                "loss may be differentiated"
            )
        ctx.recordings.end(ctx.number)
        return (None, None, *gradients)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
