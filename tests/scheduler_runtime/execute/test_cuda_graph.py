"""Recorded steps, on the CPU: PyTorch's recorder is stood in for by one that runs the step again.

The stand-in does what `torch.cuda.make_graphed_callables` does with a module: it warms up with
gradients for every output that requires one, keeps inputs and outputs in one place, and replays
into them.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo import SMALL
from graphs.model_calls.call import Call
from scheduler_runtime import CudaGraphError, apply
from scheduler_runtime.execute import cuda_graph
from solver import solve
from tests.support.same_bits import assert_equal

CPU = torch.device("cpu")


class Recorder:
    """Stands in for torch.cuda.make_graphed_callables."""

    def __init__(self) -> None:
        self.samples: list[tuple[torch.Tensor, ...]] = []
        self.pools: list[Any] = []
        self.streams: list[Any] = []

    def __call__(self, step, samples, *, allow_unused_input, pool):
        assert not torch.is_autocast_enabled("cpu"), "PyTorch refuses to record under autocast"
        self.samples.append(samples)
        self.pools.append(pool)
        self.streams.append(torch.cuda.graph.default_capture_stream)
        parameters = tuple(step.parameters())
        leaves = tuple(t for t in (*samples, *parameters) if t.requires_grad)

        def differentiated(outputs, gradients):
            found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
            return dict(zip(leaves, found, strict=True))

        for _ in range(3):
            wanted = tuple(o for o in step(*samples) if o.requires_grad)
            differentiated(wanted, [torch.ones_like(o) for o in wanted])
        static = tuple(o.detach() for o in step(*samples))
        running: list[Any] = []

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for sample, new in zip(samples, inputs, strict=False):
                    sample.copy_(new)
                with torch.enable_grad():
                    running[:] = step(*samples)
                for place, new in zip(static, running, strict=True):
                    place.copy_(new)
                return tuple(place.detach() for place in static)

            @staticmethod
            def backward(ctx, *gradients):
                found = differentiated(running, gradients)
                return tuple(found.get(leaf) for leaf in (*samples, *parameters))

        return lambda *inputs: Graphed.apply(*inputs, *parameters)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    stands_in = Recorder()
    monkeypatch.setattr(cuda_graph, "check_model", lambda _model: None)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", stands_in)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    return stands_in


class Normed(nn.Module):
    """Loss and logits, with statistics that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.last(F.relu(self.norm(self.first(x))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "name": "normed"}


def normed(n: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seed)
    return Normed(), (torch.randn(n, 6), torch.arange(n) % 3)


def loss_of(output: Any, _batch: Any) -> torch.Tensor:
    return output["loss"]


def recorded(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> nn.Module:
    solution = solve(model, batch, budget="1GB", reserve=0, loss=loss_of, time_limit_s=600)
    return apply(model, solution, cuda_graph=True)


def cleared(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def test_steps_are_those_of_the_plain_model(recorder):
    model, batch = normed()
    twin = copy.deepcopy(model)
    recorded(model, batch)
    first = [t.clone() for t in batch]
    losses = []
    for step in range(3):
        each = (batch[0] + step, batch[1])
        output, plain = model(*each), twin(*each)
        assert output["name"] == "normed"
        for name in ("loss", "logits"):
            assert torch.equal(output[name], plain[name])
        losses.append((output["loss"].detach(), float(plain["loss"].detach())))
        output["loss"].backward()
        plain["loss"].backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        assert_equal(model.buffers(), twin.buffers())
        cleared(model)
        cleared(twin)
    assert len(recorder.samples) == 1
    assert [t.data_ptr() for t in recorder.samples[0]] != [t.data_ptr() for t in batch]
    assert all(torch.equal(a, b) for a, b in zip(first, batch, strict=True))
    assert all(float(loss) == plain for loss, plain in losses), "a loss was written over"


@pytest.mark.slow
def test_autocast_is_off_while_the_step_is_recorded(recorder):
    model, batch = normed()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded(model, batch)
        output, plain = model(*batch), twin(*batch)
    output["loss"].backward()
    plain["loss"].backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_gradient_for_what_is_not_planned_is_refused(recorder):
    model, batch = normed()
    recorded(model, batch)
    output = model(*batch)
    with pytest.raises(RuntimeError, match="expects no gradient for"):
        (output["loss"] + output["logits"].sum()).backward()


def test_gradients_that_are_there_are_refused(recorder):
    model, batch = normed()
    recorded(model, batch)
    model(*batch)["loss"].backward()
    with pytest.raises(CudaGraphError, match=r"'first.weight' has a gradient already"):
        model(*batch)


def test_a_step_is_one_forward_pass_and_one_backward_pass(recorder):
    model, batch = normed()
    recorded(model, batch)
    first, second = (model(*batch)["loss"] for _ in range(2))
    with pytest.raises(CudaGraphError, match="another forward pass ran since"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(CudaGraphError, match="its backward pass ran already"):
        second.backward()


@pytest.mark.slow
def test_shapes_share_memory_and_a_stream_which_pytorch_gets_back(recorder):
    model, batch = normed()
    plans = [
        solve(model, normed(n)[1], budget="1GB", reserve=0, loss=loss_of, time_limit_s=600)
        for n in (4, 5)
    ]
    apply(model, plans, cuda_graph=True)
    before = torch.cuda.graph.default_capture_stream
    for n in (4, 5, 4):
        model(*normed(n)[1])["loss"].backward()
        cleared(model)
    assert torch.cuda.graph.default_capture_stream is before
    assert len(recorder.pools) == 2
    assert len(set(recorder.pools)) == len(set(recorder.streams)) == 1
    assert recorder.streams[0] is not before
    copied = copy.deepcopy(model)
    copied(*batch)
    assert recorder.pools[-1] is not recorder.pools[0], "a copy has memory of its own"


def test_what_fails_while_recorded_is_told_and_buffers_are_as_before(recorder, monkeypatch):
    model, batch = normed()
    recorded(model, batch)

    def stops(step, samples, **_options):
        step(*samples)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", stops)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(CudaGraphError, match="cannot be recorded: operation not permitted"):
        model(*batch)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_a_batch_elsewhere_is_refused():
    batch = (torch.ones(2, device="meta"),)
    with pytest.raises(CudaGraphError, match="tensor 0 of the batch is on meta, the model on cpu"):
        cuda_graph.check_call(Call.of(batch, {}), CPU)


@pytest.mark.slow
def test_a_cuda_graph_is_refused_on_the_cpu():
    model, batch = SMALL["gpt2"].made(CPU)
    solution = solve(model, batch, budget="1GB")
    with pytest.raises(CudaGraphError, match="this one is on cpu"):
        apply(model, solution, cuda_graph=True)
    assert "forward" not in model.__dict__
