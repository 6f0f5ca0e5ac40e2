"""A mesh of ranks that are not there, and what a rank of two kinds of sharding holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from graphs.fsdp import Sharding
from graphs.hardware import all_reduce_s, link_named
from graphs.model_calls import TraceError
from graphs.trace import fake_mesh, trace
from tests.graphs.capture.test_tensor_parallel import COLWISE, Block, square


def test_it_ends_with_its_context() -> None:
    for _ in range(2):
        with fake_mesh(4) as mesh:
            assert mesh.mesh_dim_names == ("tp",)
            assert mesh.size() == dist.get_world_size() == 4
            with pytest.raises(TraceError, match="is initialised in this process"), fake_mesh(2):
                pass
        assert not dist.is_initialized()


@pytest.mark.parametrize("n_ranks", [1, 0, True, "2"])
def test_fewer_than_two_ranks_are_refused(n_ranks: object) -> None:
    with pytest.raises(ValueError, match=f"n_ranks is {n_ranks!r}"), fake_mesh(n_ranks):
        pass


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """The norms' gradients are left as partial sums."""
    model = Two()
    for block in model.blocks:
        split = {
            "up": COLWISE["up"](input_layouts=Shard(1)),
            "down": COLWISE["down"](output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, {"norm": SequenceParallel(), **split})
    return model


@pytest.mark.slow
def test_gradients_that_are_partial_sums_are_added_up_before_fsdp_reduces_them() -> None:
    with fake_mesh(2) as mesh:
        sharding = Sharding(n_ranks=4, link="nvlink4")
        x = torch.zeros(4, 8, 32)
        graph = trace(sequence_parallel(mesh), x, loss=square, fsdp=sharding)
    sums = [node for node in graph.nodes if node.op == "fsdp.sum_over_tensor_ranks"]
    assert [node.name.rpartition("(")[2] for node in sums] == ["blocks.1)", "blocks.0)"]
    for node in sums:
        sizes = [graph.tensor_by_name[name].size_bytes for name in node.inputs]
        assert sorted(sizes) == [32 * 4] * 2  # weight and bias of the norm
        assert node.workspace_bytes == 32 * 4
        assert node.time_s == pytest.approx(
            2 * all_reduce_s(32 * 4, n_ranks=2, link=link_named("nvlink4"))
        )
