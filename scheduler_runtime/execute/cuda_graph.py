"""Record a planned step as CUDA graphs: one launch instead of thousands.

As in `torch.cuda.make_graphed_callables`, forward and backward are recorded as two graphs that
share a memory pool, after a few warm-up runs. Every later call copies its batch into the memory of
the recorded one. These conditions are checked:

- One CUDA device, and tensors at fixed addresses. A replay would not see a parameter or buffer
  that was replaced (not written) after the recording, so that is an error; so is a batch on the
  host.
- Fixed shapes: each kind of call is recorded separately. All recordings of a module share one
  memory pool, so together they take as much memory as the largest step.
- Gradients are None before each step: a replay writes them to the same memory every time, and
  `.grad` refers to it, so accumulation is an error.
- One forward pass, then its backward pass: a second forward pass overwrites what the first one
  saved, so the first one's backward pass is then an error.
- Outputs that get gradients do not share memory: autograd would not know that a write to one
  changes the other.

Random numbers are the same as without recording: random operators draw from the device's generator,
whose state the graphs advance, and `random_in_graphs` gives recomputations the numbers of their
first runs.

The loss (any output of one number) is copied out of the recording; the memory of other outputs is
overwritten by the next step.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from graphs.capture import OpaqueForward
from graphs.model_calls import Call, is_distributed, nested
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.random_in_graphs import RandomInGraphs, end_recording

N_WARM_UP = 3
"""Number of runs before the recording, as many as PyTorch does."""


class CudaGraphError(ValueError):
    """The step cannot be recorded as a CUDA graph, or not replayed; the message says why."""


def check_model(model: nn.Module) -> None:
    """Raise CudaGraphError if no step of this model can be recorded."""
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
    """Raise CudaGraphError if a tensor of the batch is not on the device: copies to it could not be
    recorded."""
    for index, tensor in enumerate(call.tensors):
        if tensor.device != device:
            raise CudaGraphError(
                f"tensor {index} of the batch is on {tensor.device}, the model on {device}: a "
                "recorded step reads only from its device; move the batch before the call"
            )


def check_program(bound: BoundProgram) -> None:
    """Raise CudaGraphError if the program does something that a graph cannot record."""
    if bound.program.pools is not None:
        raise CudaGraphError(
            "the plan copies tensors to host memory, on streams that a recording does not follow; "
            "apply it without cuda_graph, or plan without a host"
        )
    if bound.shares_outputs:
        raise CudaGraphError(
            "outputs of the model that get gradients share memory, which autograd cannot see in a "
            "recorded step: return clones of them, or apply the plan without cuda_graph"
        )
    if bound.has_checks:
        raise CudaGraphError(
            "forward checks values that the step computes, and raises an error where one is wrong, "
            "which a recorded step cannot do: switch the check off (validate_args=False of "
            "torch.distributions), or apply the plan without cuda_graph"
        )
    for piece in (bound.program.forward, *bound.program.backward):
        for node in piece.module.graph.nodes:
            run = getattr(node.target, "__self__", node.target)
            if isinstance(run, OpaqueForward):
                raise CudaGraphError(
                    f"{run.call.path!r} is planned as one piece, which runs in eager mode and may "
                    "wait for values; apply the plan without cuda_graph"
                )


class Recordings:
    """What all recordings of one module share: a memory pool, a stream, and whose turn it is.

    n_forward: number of forward passes replayed so far.
    pending_forward: the number of the forward pass that waits for its backward pass (None: none
        does).
    """

    def __init__(self) -> None:
        self.n_forward = 0
        self.pending_forward: int | None = None
        self._pool: Any = None
        self._stream: Any = None

    def pool_and_stream(self) -> tuple[Any, Any]:
        """The memory pool and the stream to record with; the current device must be the module's.

        A pool reuses memory only on the stream that it was allocated on, so recordings share both.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
        return self._pool, self._stream

    def forget(self) -> None:
        """Drop pool and stream after a failed recording, which leaves the pool recording."""
        self._pool = self._stream = None

    def begin(self) -> None:
        self.n_forward += 1
        self.pending_forward = self.n_forward

    def end(self, number: int) -> None:
        """Note that the backward pass of this forward pass runs.

        Raises CudaGraphError if it ran already, or if another forward pass overwrote what it needs.
        """
        if self.pending_forward == number:
            self.pending_forward = None
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
    """A recorded program: its calls replay the two graphs."""

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
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        try:
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.current_stream()),  # restored if the recording fails
                torch.random.fork_rng(devices=[device]),
                torch._C._DisableAutocast(),  # the program contains its casts
            ):
                self._step = _RecordedStep(bound, model, call, *recordings.pool_and_stream())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            recordings.forget()
            end_recording(device)
            raise CudaGraphError(
                f"the step cannot be recorded: {_reason(error)}; apply the plan without cuda_graph"
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
        name = next((n for n, p in model.named_parameters() if p.grad is not None), None)
        if name is not None:
            raise CudaGraphError(
                f"parameter {name!r} has a gradient already, and the recorded step overwrites the "
                "gradients of the step before: call "
                "optimizer.zero_grad(set_to_none=True) before the step, or apply the plan without "
                "cuda_graph to accumulate"
            )
        step = self._step
        inputs = (*call.tensors, *model.parameters())
        outputs = _Replay.apply(self._recordings, step, *inputs)
        return nested.unflatten(nested.with_repeats_restored(step.flat_output(outputs)), step.spec)


class _RecordedStep:
    """The two graphs and the memory that they read and write.

    Only outputs that a gradient is planned for take part in the backward pass; the memory of the
    other ones is read after a replay.

    batch: copies of the batch's tensors, which later batches overwrite.
    inputs: the copies of the batch, and the parameters.
    outputs: the tensors of the flat output; the first len(tangents) of them are differentiated.
    tangents: gradients of these outputs.
    gradients: of the inputs (None: the input gets none).
    spec: structure of the output.
    """

    def __init__(
        self, bound: BoundProgram, model: nn.Module, call: Call, pool: Any, stream: Any
    ) -> None:
        self._bound, self._model = bound, model
        self._call = Call([], call.rest, call.spec)  # without the caller's batch
        self.batch = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors)
        self.inputs = (*self.batch, *model.parameters())
        self._differentiated = [t for t in self.inputs if t.requires_grad]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        program = bound.program
        self._random = RandomInGraphs(self.inputs[-1].device, program)
        for graph, generators in zip(
            (self._forward, self._backward), self._random.generators, strict=True
        ):
            for generator in generators:
                graph.register_generator_state(generator)
        self._warm_up(stream)
        gc.collect()  # CUDA memory that is freed during a recording would abort it
        with torch.cuda.graph(self._forward, pool=pool, stream=stream), self._random.recording():
            self.outputs = self._run()
        made = self.outputs[: len(bound.gradient_outputs)]
        self.tangents = tuple(map(torch.empty_like, made))
        with torch.cuda.graph(self._backward, pool=pool, stream=stream):
            found = iter(self._differentiate(made, self.tangents))
        self.gradients = [next(found) if t.requires_grad else None for t in self.inputs]

    def _warm_up(self, stream: Any) -> None:
        """Run a few steps: libraries initialise themselves at first calls, which cannot be
        recorded."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(N_WARM_UP):
                with self._random.warming_up():
                    outputs = self._run()[: len(self._bound.gradient_outputs)]
                self._differentiate(outputs, tuple(map(torch.empty_like, outputs)))
                del outputs
        torch.cuda.synchronize()

    def _run(self) -> tuple[torch.Tensor, ...]:
        """Run the forward pass; returns the tensors of the flat output, those that a gradient is
        planned for first."""
        call = Call(list(self.batch), self._call.rest, self._call.spec)
        flat, self.spec = nested.flatten(self._bound.run(self._model, call))
        flat = nested.with_repeats_marked(flat)
        planned = self._bound.gradient_outputs
        at = [index for index, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        self._positions = (*planned, *(index for index in at if index not in planned))
        self._non_tensors = [None if index in at else item for index, item in enumerate(flat)]
        made = (flat[index] for index in self._positions)
        return tuple(t if n < len(planned) else t.detach() for n, t in enumerate(made))

    def _differentiate(
        self, outputs: tuple[torch.Tensor, ...], tangents: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(outputs, self._differentiated, tangents, allow_unused=True)

    def flat_output(self, outputs: tuple[torch.Tensor, ...]) -> list[Any]:
        """The flat output with these tensors at their places."""
        flat = list(self._non_tensors)
        for position, tensor in zip(self._positions, outputs, strict=True):
            flat[position] = tensor
        return flat

    def replay_forward(self, batch: tuple[torch.Tensor, ...]) -> None:
        for own, given in zip(self.batch, batch, strict=True):
            own.detach().copy_(given)
        self._random.begin()
        self._forward.replay()

    def replay_backward(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        for own, given in zip(self.tangents, gradients, strict=True):
            if given is None:
                own.zero_()
            else:
                own.copy_(given)
        self._backward.replay()


class _Replay(torch.autograd.Function):
    """Replays the two graphs as one function of the batch and the parameters."""

    @staticmethod
    def forward(ctx: Any, recordings: Recordings, step: _RecordedStep, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        recordings.begin()
        ctx.recordings, ctx.step, ctx.number = recordings, step, recordings.n_forward
        step.replay_forward(inputs[: len(step.batch)])
        return tuple(t.clone() if t.numel() == 1 else t.detach() for t in step.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        step = ctx.step
        n_planned = len(step.tangents)
        if any(gradient is not None for gradient in gradients[n_planned:]):
            raise RuntimeError(
                "an output receives a gradient that the plan does not expect: only the planned "
                "loss may be differentiated"
            )
        ctx.recordings.end(ctx.number)
        step.replay_backward(gradients[:n_planned])
        return (None, None, *(None if t is None else t.detach() for t in step.gradients))


def _reason(error: BaseException) -> BaseException:
    """The error that has ended the recording; leaving the recording raises further ones."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
