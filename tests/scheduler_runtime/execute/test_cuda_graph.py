"""Recorded steps, on the CPU: CUDA's graphs are stood in for by ones that run the step again.

A graph of the stand-in notes what ran while it was recorded, and a replay runs that again and
writes the results into the recorded ones' memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo import SMALL
from graphs.model_calls.call import Call
from scheduler_runtime import CudaGraphError, apply
from scheduler_runtime.execute import cuda_graph
from scheduler_runtime.execute.random_in_graphs import RandomInGraphs
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from solver import solve
from tests.support.bitwise import assert_equal, assert_same_gradients

CPU = torch.device("cpu")


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None

    def register_generator_state(self, generator: Any) -> None:
        raise AssertionError("no random operator is recomputed here")


class Recorder:
    """What was recorded, and where. fails: raised by the next recording."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.pools: list[Any] = []
        self.streams: list[Any] = []
        self.fails: RuntimeError | None = None
        self.ended: list[torch.device] = []
        self._graph: Graph | None = None
        self._run = cuda_graph._RecordedStep._run
        self._differentiate = cuda_graph._RecordedStep._differentiate
        self._running: tuple[torch.Tensor, ...] = ()

    @contextlib.contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Any) -> Iterator[None]:
        assert not torch.is_autocast_enabled("cpu"), "PyTorch refuses to record under autocast"
        self.pools.append(pool)
        self.streams.append(stream)
        self._graph = graph
        try:
            if self.fails is not None:
                raise self.fails
            yield
        except RuntimeError as error:  # as PyTorch's own end of a recording does
            raise RuntimeError("capture has been invalidated") from error
        finally:
            self._graph = None

    def run(self, step: Any) -> tuple[torch.Tensor, ...]:
        made = self._run(step)
        if self._graph is not None:
            self.steps.append(step)

            def replay() -> None:
                with torch.enable_grad():
                    self._running = self._run(step)
                for place, new in zip(made, self._running, strict=True):
                    place.data.copy_(new)

            self._graph.replay = replay
        return made

    def differentiate(self, step: Any, made: Any, tangents: Any) -> Any:
        found = self._differentiate(step, made, tangents)
        if self._graph is not None:

            def replay() -> None:
                again = self._differentiate(step, self._running[: len(made)], tangents)
                for place, new in zip(found, again, strict=True):
                    if place is not None:
                        place.copy_(new)

            self._graph.replay = replay
        return found


class WithoutRandom:
    """Stands in for RandomInGraphs, which asks for the device's generator."""

    def __init__(self, *_: Any) -> None:
        self.generators: Any = ((), ())

    recording = warming_up = staticmethod(contextlib.nullcontext)

    def begin(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    stands_in = Recorder()
    step = cuda_graph._RecordedStep
    monkeypatch.setattr(cuda_graph, "check_model", lambda _model: None)
    monkeypatch.setattr(cuda_graph, "RandomInGraphs", WithoutRandom)
    monkeypatch.setattr(cuda_graph, "end_recording", stands_in.ended.append)
    monkeypatch.setattr(step, "_run", lambda self: stands_in.run(self))
    monkeypatch.setattr(step, "_differentiate", lambda self, *a: stands_in.differentiate(self, *a))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", stands_in.graph)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
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
    for n in range(3):
        each = (batch[0] + n, batch[1])
        output, plain = model(*each), twin(*each)
        assert output["name"] == "normed"
        for name in ("loss", "logits"):
            assert torch.equal(output[name], plain[name])
        losses.append((output["loss"].detach(), float(plain["loss"].detach())))
        output["loss"].backward()
        plain["loss"].backward()
        assert_same_gradients(model, twin)
        assert_equal(model.buffers(), twin.buffers())
        cleared(model)
        cleared(twin)
    (step,) = recorder.steps
    assert [t.data_ptr() for t in step.batch] != [t.data_ptr() for t in batch]
    assert_equal(first, batch)
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
    assert_same_gradients(model, twin)


def test_a_gradient_for_what_is_not_planned_is_refused(recorder):
    model, batch = normed()
    recorded(model, batch)
    output = model(*batch)
    with pytest.raises(RuntimeError, match="a gradient that the plan does not expect"):
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
def test_shapes_share_memory_and_a_stream(recorder):
    model, batch = normed()
    plans = [
        solve(model, normed(n)[1], budget="1GB", reserve=0, loss=loss_of, time_limit_s=600)
        for n in (4, 5)
    ]
    apply(model, plans, cuda_graph=True)
    for n in (4, 5, 4):
        model(*normed(n)[1])["loss"].backward()
        cleared(model)
    assert len(recorder.steps) == 2
    assert len(set(recorder.pools)) == len(set(recorder.streams)) == 1
    copied = copy.deepcopy(model)
    copied(*batch)
    assert recorder.pools[-1] is not recorder.pools[0], "a copy has memory of its own"


def test_what_fails_while_recorded_is_told_and_buffers_are_as_before(recorder):
    model, batch = normed()
    recorded(model, batch)
    recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(CudaGraphError, match="cannot be recorded: operation not permitted"):
        model(*batch)
    assert recorder.ended == [CPU], "the generator is taken out of the recording"
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_a_batch_elsewhere_is_refused():
    batch = (torch.ones(2, device="meta"),)
    with pytest.raises(CudaGraphError, match="tensor 0 of the batch is on meta, the model on cpu"):
        cuda_graph.check_call(Call.of(batch, {}), CPU)


@pytest.mark.slow
def test_a_cuda_graph_is_refused_on_the_cpu():
    model, batch = SMALL["gpt2"].model_and_batch(CPU)
    solution = solve(model, batch, budget="1GB")
    with pytest.raises(CudaGraphError, match="this one is on cpu"):
        apply(model, solution, cuda_graph=True)
    assert "forward" not in model.__dict__


class Generator:
    """Stands in for a CUDA generator, whose offset each draw moves on."""

    def __init__(self, state: dict[str, int] | None = None) -> None:
        self.state = state or {"seed": 5, "offset": 100}

    def clone_state(self) -> Generator:
        return Generator(dict(self.state))

    def get_offset(self) -> int:
        return self.state["offset"]

    def set_offset(self, offset: int) -> None:
        self.state["offset"] = offset

    def initial_seed(self) -> int:
        return self.state["seed"]

    def manual_seed(self, seed: int) -> None:
        self.state.update(seed=seed, offset=0)

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


def test_recomputed_random_operators_draw_where_their_first_runs_did(monkeypatch):
    """Two operators of three are recomputed, the later one first and twice."""
    own = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", [own])
    again = torch.fx.Graph()
    for _ in range(3):
        again.call_function(recompute_random, (None, None, None))
    graphs = [torch.fx.GraphModule(torch.nn.Module(), g) for g in (torch.fx.Graph(), again)]
    pieces = [mock.Mock(module=graph) for graph in graphs]
    program = mock.Mock(forward=pieces[0], backward=[pieces[1]])
    random = RandomInGraphs(torch.device("cuda", 0), program)
    assert [len(each) for each in random.generators] == [0, 3]

    def draw(n: int) -> tuple[int, int]:
        at = own.initial_seed(), own.get_offset()
        own.set_offset(at[1] + n)
        return at

    def forward() -> list[Any]:
        return [run_and_keep_state(draw, torch.device("cpu"), n)[1] for n in (4, 8, 12)]

    with random.warming_up():
        forward()
    with random.recording():
        first, second, _ = forward()
    drawn = []
    for kept in (second, first, second):
        recompute_random(lambda: drawn.append(own.state), torch.device("cpu"), kept)
    own.state.update(seed=7, offset=40)
    random.begin()
    offsets = [(state["seed"], state["offset"]) for state in drawn]
    assert offsets == [(7, 44), (7, 40), (7, 44)]
    assert own.state == {"seed": 7, "offset": 40}
