"""A module of DTensors traced as one rank runs it, in one process that stands for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphs.capture.tensor_parallel import meshes_on
from graphs.costs import Roofline
from graphs.hardware import LINKS, all_reduce_s, named
from graphs.model_calls import TraceError
from graphs.trace import trace
from scheduler_runtime.applying import CudaGraphError, apply
from solver import solve
from tests.support.budgets import baseline_peak_bytes

ROWS, LENGTH, WIDTH = 4, 16, 32


class Block(nn.Module):
    def __init__(self, *, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def square(output: torch.Tensor, _batch: object) -> torch.Tensor:
    return output.square().mean()


def group_of(n_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=n_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    for _ in group_of(2):
        yield init_device_mesh("cpu", (2,))


COLWISE = {"up": ColwiseParallel, "down": RowwiseParallel}


def parallel(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    block = Block() if model is None else model
    return parallelize_module(block, mesh, {path: style() for path, style in COLWISE.items()})


def batch(*, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(ROWS, LENGTH, WIDTH, device=device)


@pytest.mark.slow
def test_a_rank_holds_its_parts_and_collectives_are_nodes(mesh: DeviceMesh) -> None:
    graph = trace(parallel(mesh), batch(), loss=square, optimizer=torch.optim.AdamW)
    sizes = {path: graph.tensor_by_name[t].size_bytes for path, t in graph.meta.parameters.items()}
    assert sizes["up.weight"] == 4 * WIDTH * WIDTH * 4 // 2
    assert sizes["down.weight"] == 4 * WIDTH * WIDTH * 4 // 2
    assert sizes["down.bias"] == WIDTH * 4
    resident = [t for t in graph.resident if t.kind == "optimizer_state"]
    n_parameter_bytes = sum(sizes.values())
    assert 2 * n_parameter_bytes <= sum(t.size_bytes for t in resident) < 2.1 * n_parameter_bytes
    collectives = [node for node in graph.nodes if "c10d" in node.op]
    assert [node.op for node in collectives] == ["_c10d_functional.all_reduce.default"] * 2
    assert [node.phase for node in collectives] == ["forward", "backward"]
    n_bytes = ROWS * LENGTH * WIDTH * 4
    for node in collectives:
        assert node.recomputable == (node.phase == "forward")
        assert node.time_s == all_reduce_s(n_bytes, n_ranks=2, link=LINKS["gloo"])
        assert graph.tensor_by_name[node.outputs[0]].size_bytes == n_bytes


@pytest.mark.slow
def test_the_sequence_is_gathered_and_scattered(mesh: DeviceMesh) -> None:
    model = parallelize_module(
        Block(),
        mesh,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    graph = trace(model, batch()[:, : LENGTH // 2].contiguous(), loss=square)
    kinds = [node.op.split(".")[1] for node in graph.nodes if "c10d" in node.op]
    assert kinds == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 2
    whole_bytes = ROWS * LENGTH * WIDTH * 4
    for node in graph.nodes:
        made = sum(graph.tensor_by_name[name].size_bytes for name in node.outputs)
        if "all_gather" in node.op:
            assert (made, node.workspace_bytes) == (whole_bytes, whole_bytes)
        if "reduce_scatter" in node.op:
            assert (made, node.workspace_bytes) == (whole_bytes // 2, whole_bytes)


@pytest.mark.slow
def test_meta_tensors_give_the_graph_of_real_ones(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = parallel(mesh)
    graph = trace(model, batch(device="meta"), loss=square)
    assert graph.graph_id == trace(parallel(mesh), batch(), loss=square).graph_id


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("link", ["nvlink4", "ib-ndr"])
def test_a_link_is_slower_by_what_it_is_slower(mesh: DeviceMesh, link: str) -> None:
    costs = Roofline(named("h100"), link=LINKS[link])
    graph = trace(parallel(mesh), batch(), loss=square, costs=costs)
    expected_s = all_reduce_s(ROWS * LENGTH * WIDTH * 4, n_ranks=2, link=LINKS[link])
    assert {n.time_s for n in graph.nodes if "c10d" in n.op} == {expected_s}


@pytest.mark.slow
def test_a_plan_repeats_a_collective_only_where_that_pays(mesh: DeviceMesh) -> None:
    """Against plans that may not: never slower, and with the room of the plain step not at all."""
    graph = trace(parallel(mesh), batch(), loss=square, optimizer=torch.optim.AdamW)
    nodes = [replace(n, recomputable=n.recomputable and "c10d" not in n.op) for n in graph.nodes]
    once = replace(graph, nodes=tuple(nodes))
    least, least_once = (solve(each, budget=1).minimum_budget_bytes for each in (graph, once))
    assert least <= least_once
    peak_bytes = baseline_peak_bytes(graph)
    for share in (0.0, 0.3, 0.6, 1.0):
        budget_bytes = int(least_once + share * (peak_bytes - least_once))
        may, may_not = (solve(each, budget=budget_bytes) for each in (graph, once))
        assert may.simulation.time_s <= may_not.simulation.time_s * (1 + 1e-9)
        order = Counter(may.schedule.order)
        n_again = sum(order[n.name] - 1 for n in graph.nodes if "c10d" in n.op)
        assert n_again == 0 or share < 1.0


def test_shards_that_do_not_come_out_even_are_refused() -> None:
    for _ in group_of(3):
        model = parallel(init_device_mesh("cpu", (3,)))
        with pytest.raises(
            TraceError, match=r"dimension 0 of up\.weight has size 128, which 3 ranks do not divide"
        ):
            trace(model, batch(), loss=square)


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_is_refused() -> None:
    for _ in group_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(mesh["tp"])
        trace(model, batch(), loss=square)  # over one of them
        model.norm.weight = nn.Parameter(
            distribute_tensor(model.norm.weight.data, mesh, [Replicate(), Replicate()])
        )
        with pytest.raises(TraceError, match=r"norm\.weight .* mesh of 2 dimensions \(2, 2\)"):
            trace(model, batch(), loss=square)


@pytest.mark.slow
def test_one_dimension_of_a_mesh_may_be_taken_again_for_another_model() -> None:
    """DTensor remembers the equal mesh of the first one, which is another object."""
    for _ in group_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        for _ in range(2):
            model = parallel(mesh["tp"])
            apply(model, solve(model, batch(), budget="1GB", loss=square))
            model(batch()).square().mean().backward()


@pytest.mark.slow
def test_fsdp_on_top_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    for _ in group_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = fully_shard(parallel(mesh["tp"]), mesh=mesh["dp"])
        with pytest.raises(TraceError, match=r"sharded by FSDP2.*plan before sharding"):
            trace(model, batch(), loss=square)


def test_a_recording_is_refused(mesh: DeviceMesh) -> None:
    model = parallel(mesh)
    solution = solve(model, batch(), loss=square, budget="1GB")
    with pytest.raises(CudaGraphError, match="cuda_graph=True with distributed parameters"):
        apply(model, solution, cuda_graph=True)


@pytest.mark.slow
def test_parameters_of_several_meshes_are_refused() -> None:
    for _ in group_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        model = parallelize_module(Block(), mesh["a"], {"up": ColwiseParallel()})
        model = parallelize_module(model, mesh["b"], {"down": RowwiseParallel()})
        with pytest.raises(TraceError, match=r"up\.weight and down\.weight .* different meshes"):
            trace(model, batch(), loss=square)


def test_partial_parameters_are_refused(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Partial

    model = parallel(mesh)
    value = DTensor.from_local(torch.zeros(WIDTH), mesh, [Partial()])
    model.down.bias = nn.Parameter(value)
    with pytest.raises(TraceError, match=r"down\.bias is placed as Partial.*Shard or Replicate"):
        trace(model, batch(), loss=square)


def test_without_a_process_group_the_error_names_what_to_call() -> None:
    for _ in group_of(2):
        model = parallel(init_device_mesh("cpu", (2,)))
    with pytest.raises(TraceError, match="no process group is initialised: call torch"):
        trace(model, batch(), loss=square)


def test_a_model_with_a_style_of_its_own_is_refused(mesh: DeviceMesh) -> None:
    model = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel())
    with pytest.raises(TraceError, match="Linear itself has a parallel style"):
        trace(model, batch(), loss=square)


def test_a_distributed_batch_or_output_is_refused(mesh: DeviceMesh) -> None:
    given: Any = distribute_tensor(batch(), mesh, [Replicate()])
    with pytest.raises(TraceError, match="a tensor of the batch is a DTensor"):
        trace(parallel(mesh), given, loss=square)
    last = ColwiseParallel(use_local_output=False)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(TraceError, match="the model returns a DTensor"):
        trace(parallelize_module(model, mesh, {"0": last}), batch(), loss=square)


def test_plain_and_distributed_tensors_in_one_operator_are_refused(mesh: DeviceMesh) -> None:
    model = parallelize_module(Block(), mesh, {"norm": SequenceParallel()})
    with pytest.raises(TraceError, match=r"mixed torch\.Tensor and DTensor"):
        trace(model, batch(), loss=square)


def test_meshes_are_of_the_device_that_is_traced_for(mesh: DeviceMesh) -> None:
    """DTensor moves what it is given to the mesh's device: a mesh of absent ranks is of CPUs."""
    with meshes_on(torch.device("cuda", 0)):
        assert mesh.device_type == "cuda"
    with meshes_on(None):
        assert mesh.device_type == "cpu"


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="what is refused is a card that is absent, and one is here: tests/gpu/test_ranks.py "
    "traces for it",
)
def test_a_card_that_is_absent_is_named(mesh: DeviceMesh) -> None:
    """Autograd's engine asks for the stream of gradients that are DTensors."""
    with pytest.raises(TraceError, match="cannot be traced for a card that is not in this machine"):
        trace(parallel(mesh), batch(), loss=square, device="cuda", costs=Roofline(named("h100")))
    found = solve(
        parallel(mesh), batch(), loss=square, budget="60GB", device="h100", optimizer="AdamW"
    )
    assert found.graph.meta.environment["device"] == "cpu"
