"""Tracing: what is counted, what stays unchanged, and what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphs.capture.joint_graph as capturing
from graphs.graph import Graph
from graphs.trace import trace
from solver.schedule.memory import activation_bytes_by_dtype, memory_at
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.budgets import baseline_peak_bytes
from tests.support.models import (
    Classifier,
    ConvNet,
    NormAndDropout,
    SharedGradients,
    TiedLanguageModel,
)

ADAMW = torch.optim.AdamW


def kind_bytes(graph: Graph, kind: str) -> int:
    return sum(t.size_bytes for t in graph.tensors if t.kind == kind)


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.slow
def test_parameters_gradients_and_optimizer_state_take_what_they_take() -> None:
    model = TiedLanguageModel()
    graph = trace(model, model.batch(), optimizer=ADAMW(model.parameters()))
    n_bytes = parameter_bytes(model)  # the tied weight once
    assert kind_bytes(graph, "parameter") == n_bytes
    assert kind_bytes(graph, "gradient") == n_bytes
    n_tensors = len(list(model.parameters()))
    assert kind_bytes(graph, "optimizer_state") == 2 * n_bytes + 4 * n_tensors  # and step counts
    assert kind_bytes(graph, "input") == model.batch().numel() * 8


@pytest.mark.slow
def test_parameter_bytes_are_recorded_by_dtype() -> None:
    model = TiedLanguageModel()
    n_bytes = parameter_bytes(model)
    assert trace(model, model.batch()).meta.parameter_bytes == {"float32": n_bytes}
    half = model.to(torch.bfloat16)
    assert trace(half, half.batch()).meta.parameter_bytes == {"bfloat16": n_bytes // 2}


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_activations_are_recorded_by_dtype(outside: bool) -> None:
    """Under autocast, with a loss of the caller's and with indices of max pooling."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(F.max_pool2d(torch.relu(self.conv(x)), 14).flatten(1))
            return y if outside else y.float().square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace(
            Pooled(),
            torch.randn(2, 3, 16, 16),
            loss=(lambda y, _: y.float().square().mean()) if outside else None,
            inputs=None,
        )
    assert set(graph.meta.dtypes) >= {"bfloat16", "float32", "int64"}
    held = {t.name for t in graph.tensors if t.kind in ("activation", "output", "tangent")}
    assert held <= set(graph.meta.dtype_of)
    plain = baseline(graph)
    for position in range(len(plain.ops)):
        by_dtype = activation_bytes_by_dtype(graph, plain, position)
        assert sum(by_dtype.values()) == memory_at(graph, plain, position)["activations"]
        assert "unknown" not in by_dtype
    pooled = next(n for n in graph.nodes if "max_pool2d_with_indices.default" in n.op)
    _, indices = pooled.outputs
    assert graph.meta.dtype_of[indices] == "int64"
    assert Graph.from_json(graph.to_json()).meta.dtypes == graph.meta.dtypes


def test_batch_norm_writes_its_buffers_once() -> None:
    model = NormAndDropout()
    graph = trace(model, model.batch())
    updates = [node for node in graph.nodes if node.op == "aten.copy_.default"]
    assert len(updates) == 3
    assert not any(node.recomputable for node in updates)
    assert kind_bytes(graph, "buffer") == 2 * 16 * 4 + 8 + 5056  # and the dropout's random state


def test_fused_attention_on_the_cpu_keeps_no_random_state() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.heads(x).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(query, key, value).sum()

    graph = trace(Attention(), (torch.randn(2, 1, 16, 8),))
    (attention,) = (n for n in graph.nodes if n.op.endswith("attention_for_cpu.default"))
    assert attention.recomputable
    assert not kind_bytes(graph, "buffer")


def test_what_the_model_returns_is_held_to_the_end() -> None:
    model = NormAndDropout()
    graph = trace(model, model.batch())
    assert len(graph.returned) == 2
    assert not any(graph.producer[name].recomputable for name in graph.returned)
    beside = {t.name for t in graph.tensors if t.kind == "output"}
    (loss,) = set(graph.returned) - beside
    assert graph.producer[loss].op == "aten.mse_loss.default"


def test_module_paths_reach_forward_and_backward_nodes() -> None:
    model = TiedLanguageModel()
    graph = trace(model, model.batch())
    paths = {(node.phase, node.module) for node in graph.nodes}
    assert ("forward", "blocks.1.qkv") in paths
    assert ("backward", "blocks.1.qkv") in paths


def test_tracing_leaves_no_trace() -> None:
    model = NormAndDropout()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    trace(model, model.batch(), optimizer=ADAMW(model.parameters()))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert not torch.compiler.is_compiling()
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize("make", [NormAndDropout, TiedLanguageModel, ConvNet])
def test_meta_and_real_models_give_the_same_graph(make: type) -> None:
    real = make()
    with torch.device("meta"):
        meta = make()
    batch = real.batch()
    on_meta = torch.utils._pytree.tree_map(lambda t: t.to("meta"), batch)
    assert trace(real, batch).graph_id == trace(meta, on_meta).graph_id


@pytest.mark.slow
def test_another_shape_mode_or_autocast_is_another_graph() -> None:
    model = TiedLanguageModel()
    batch = model.batch()
    ids = {trace(model, batch).graph_id, trace(model, batch[:2]).graph_id}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids.add(trace(model, batch).graph_id)
    model.eval()
    ids.add(trace(model, batch).graph_id)
    assert len(ids) == 4


@pytest.mark.slow
def test_a_loss_outside_is_counted_and_never_recomputed() -> None:
    model = Classifier()
    graph = trace(model, model.batch(), loss=model.loss)
    outside = [node for node in graph.nodes if node.phase == "outside"]
    assert [node.op for node in outside] == [
        "aten._log_softmax.default",
        "aten.nll_loss_forward.default",
        "aten.nll_loss_backward.default",
        "aten._log_softmax_backward_data.default",
    ]
    assert not any(node.recomputable for node in outside)
    alone = trace(
        model, model.batch(), loss=lambda output, batch: output.square().mean()
    ).module_part()
    assert graph.module_part().graph_id == alone.graph_id


def test_a_loss_whose_gradient_is_expanded_is_made_contiguous() -> None:
    model = Classifier()
    graph = trace(model, model.batch(), loss=lambda output, batch: output.sum())
    tangent = next(t for t in graph.tensors if t.kind == "tangent" and t.name in graph.producer)
    assert tangent.size_bytes == 7 * 5 * 4
    simulate(graph, baseline(graph))


@pytest.mark.slow
def test_accumulated_gradients_are_resident_from_the_start() -> None:
    model = TiedLanguageModel()
    fresh = trace(model, model.batch())
    accumulated = trace(model, model.batch(), gradients="accumulate")
    added = accumulated.resident_bytes - fresh.resident_bytes
    assert added == parameter_bytes(model)
    assert baseline_peak_bytes(accumulated) > baseline_peak_bytes(fresh)


def test_each_parameter_has_a_gradient_of_its_own() -> None:
    model = SharedGradients()
    graph = trace(model, model.batch())
    assert kind_bytes(graph, "gradient") == parameter_bytes(model)
    held = [t.name for t in graph.tensors if t.kind == "gradient"]
    assert len(held) == len(list(model.parameters()))
    assert set(held) <= set(graph.outputs)


@pytest.mark.slow
def test_frozen_parameters_have_no_gradient() -> None:
    model = TiedLanguageModel()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    graph = trace(model, model.batch(), optimizer=ADAMW(model.parameters()))
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert kind_bytes(graph, "gradient") == trained


def test_shared_parameters_through_functional_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, self.weight), self.weight).sum()

    graph = trace(Twice(), torch.zeros(2, 4))
    assert kind_bytes(graph, "parameter") == 64
    assert kind_bytes(graph, "gradient") == 64


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"y": y, "loss": y.mean(), "fixed": y.detach().mean()}


def test_looking_for_the_loss_among_the_outputs_leaves_no_trace() -> None:
    def noisy(output: dict[str, torch.Tensor], _: object) -> torch.Tensor:
        y = output.pop("y")
        return (y + torch.rand(3, 1)).square().sum()

    model = _Several()
    state = torch.get_rng_state()
    graph = trace(model, torch.ones(3, 4), loss=noisy)
    assert any(node.phase == "outside" for node in graph.nodes)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_two_threads_that_trace_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is patched while a step is traced is the process's: the second trace waits."""
    inside: list[int] = []
    together: list[int] = []
    traced = capturing.aot_export_joint_with_descriptors

    def seen(*args: Any, **kwargs: Any) -> Any:
        inside.append(threading.get_ident())
        together.append(len(inside))
        entered.set()
        if len(together) == 1:  # time for the other to come in, if it is let in
            both_in.wait(timeout=1)
        else:
            both_in.set()
        try:
            return traced(*args, **kwargs)
        finally:
            inside.remove(threading.get_ident())

    entered, both_in = threading.Event(), threading.Event()
    monkeypatch.setattr(capturing, "aot_export_joint_with_descriptors", seen)
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, width)) for width in (4, 5)]
    found: dict[int, Graph] = {}

    def run(index: int) -> None:
        if index:
            entered.wait(timeout=60)
        found[index] = trace(models[index], torch.ones(2, 8), loss=lambda out, _: out.mean())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(together) == 1
    monkeypatch.undo()
    for index, model in enumerate(models):
        alone = trace(model, torch.ones(2, 8), loss=lambda out, _: out.mean())
        assert found[index].graph_id == alone.graph_id
        assert {n.module for n in found[index].nodes} == {n.module for n in alone.nodes}


def test_a_step_of_another_thread_is_not_taken_for_the_traced_one() -> None:
    """Global hooks record the module of each operator; steps of other threads are ignored."""
    plain = nn.Linear(8, 8)

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meanwhile = threading.Thread(target=lambda: plain(torch.ones(2, 8)))
            meanwhile.start()
            meanwhile.join()
            return self.inner(x).square().mean()

    model = Waits()
    assert {node.module for node in trace(model, torch.ones(2, 8)).forward_nodes} == {"", "inner"}
