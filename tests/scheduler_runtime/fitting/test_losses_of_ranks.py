"""A loss outside of the model that communicates with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import _AllGather
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs import OpCall
from graphs.costs.collectives import Collective
from scheduler_runtime import fit, plans_of
from tests.support.bitwise import assert_equal

WIDTH, N_ROWS = 16, 64


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, with gradients: `torch.distributed.nn.functional.all_gather`."""
    return torch.cat(_AllGather.apply(dist.group.WORLD, rows))


def averaged(rows: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(means := rows.detach().mean(0))
    return rows - means


def gathered_into(rows: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    dist.all_gather_into_tensor(others := torch.empty(N_ROWS, WIDTH), rows.detach())
    dist.broadcast(others, src=0)
    return rows * others


def functionally_gathered(rows: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(rows, 0, dist.group.WORLD)


def train(share: Callable[[torch.Tensor], torch.Tensor], budget: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if budget is not None:
        fit(model, budget=budget, optimizer=optimizer)
    results = []
    for _ in range(2):
        x = torch.randn(N_ROWS, WIDTH)
        optimizer.zero_grad()
        rows = F.normalize(share(model(x)), dim=1)
        loss = F.cross_entropy(rows @ rows.t(), torch.arange(N_ROWS))
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    if budget is not None:
        (plan,) = plans_of(model)  # the second step, too, is planned for what the first one showed
        assert "besides the outputs" in plan.notes[0]
    return results


@pytest.mark.usefixtures("group")
@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("share", [gathered, averaged, gathered_into, functionally_gathered])
def test_a_loss_that_communicates_is_counted(
    share: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert_equal(train(share, None), train(share, 200_000))


class Seen(TorchDispatchMode):
    """collectives: those that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if (found := Collective.of(OpCall(func, args, kwargs or {}, value))) is not None:
            self.collectives.append(found)
        return value


@pytest.mark.usefixtures("group")
def test_a_collective_of_torch_distributed_counts_as_the_functional_one() -> None:
    world, parts, whole = dist.group.WORLD, torch.ones(4, 8), torch.empty(4, 8)
    with Seen() as seen:
        dist.all_gather([whole], parts)
        dist.all_gather_into_tensor(whole, parts)
        functional.all_gather_tensor(parts, 0, world).wait()
        dist.reduce_scatter_tensor(whole, parts)
        functional.reduce_scatter_tensor(parts, "sum", 0, world).wait()
    gather, same, functional_gather, scatter, functional_scatter = seen.collectives
    assert gather == same == functional_gather
    assert scatter == functional_scatter
    assert gather.gloo_workspace_bytes == scatter.gloo_workspace_bytes == parts.nbytes
