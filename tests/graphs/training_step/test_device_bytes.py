"""Bytes that a CUDA card holds besides the step's tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import DEVICES, named
from graphs.trace import trace
from graphs.training_step import cublas_workspace_bytes, with_device_bytes
from solver.schedule import baseline, memory_at

MIB = 2**20


class Model(nn.Module):
    def __init__(self, *, multiplies: bool = True) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(3, 5) if multiplies else nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def traced(device: str, **options: bool) -> Graph:
    return trace(Model(**options), torch.randn(2, 3), costs=Roofline(named(device)))


def added(graph: Graph) -> dict[str, int]:
    names = ("cublas_workspaces", "allocator_rounding")
    return {t.name: t.size_bytes for t in graph.resident if t.name in names}


@pytest.fixture(autouse=True)
def default_configuration(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_each_thread_has_a_workspace():
    assert added(traced("a100"))["cublas_workspaces"] == 2 * 8320 * 1024
    assert added(traced("h100"))["cublas_workspaces"] == 2 * 32 * MIB
    assert added(traced("b200"))["cublas_workspaces"] == 2 * 32 * MIB
    assert "cublas_workspaces" not in added(traced("a100", multiplies=False))


@pytest.mark.parametrize("op", ["opaque_forward(Experts)", "head_loop(aten.mm; 64 rows)"])
def test_products_inside_of_one_node_count(op):
    graph = traced("cpu", multiplies=False)
    first, *rest = graph.nodes
    graph = dataclasses.replace(graph, nodes=(dataclasses.replace(first, op=op), *rest))
    assert "cublas_workspaces" in added(with_device_bytes(graph, named("a100")))


def test_a_step_without_backward_pass_multiplies_in_one_thread():
    graph = traced("cpu")
    forward = dataclasses.replace(graph, nodes=graph.forward_nodes, outputs=())
    assert added(with_device_bytes(forward, named("a100")))["cublas_workspaces"] == 8320 * 1024


def test_the_environment_sets_the_workspace_as_in_pytorch(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace_bytes(named("a100")) == 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert cublas_workspace_bytes(named("h100")) == 128 * 1024


def test_an_unknown_card_gets_the_larger_workspace():
    unknown = dataclasses.replace(named("a100"), compute_capability=None)
    assert cublas_workspace_bytes(unknown) == 32 * MIB
    assert all(d.compute_capability for d in DEVICES.values() if d.kind == "cuda")


def test_each_tensor_is_rounded_to_512_bytes():
    on_cpu, on_card = traced("cpu"), traced("a100")
    sizes = [t.size_bytes for t in on_cpu.tensors if t.alias_of is None]
    rounded = sum(512 * -(-size // 512) for size in sizes)
    assert added(on_card)["allocator_rounding"] == rounded - sum(sizes)


def test_the_breakdown_shows_it_as_workspace():
    graph = traced("a100")
    schedule = baseline(graph)
    parts = memory_at(graph, schedule, None)
    assert parts["workspace"] == sum(added(graph).values())
    assert parts["buffers"] == 0
    assert sum(parts.values()) == graph.resident_bytes
    assert Graph.from_json(graph.to_json()).meta.device_bytes == graph.meta.device_bytes


def test_the_cpu_and_what_apply_compares_do_not_change():
    on_cpu, on_card = traced("cpu"), traced("h100")
    assert added(on_cpu) == {}
    assert on_card.module_part().graph_id == on_cpu.module_part().graph_id
    assert on_card.resident_bytes == on_cpu.resident_bytes + sum(added(on_card).values())
