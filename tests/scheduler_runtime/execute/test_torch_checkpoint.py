"""Checkpointed modules in training steps that run backward twice or give them other parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.func import functional_call

from scheduler_runtime.execute import CheckpointedForward, SavedCalls, checkpointed_as_whole
from scheduler_runtime.execute.sequential_segments import SegmentedForward
from solver.module_checkpointing import CheckpointRegion
from tests.support.bitwise import assert_equal


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())


def whole(model: nn.Sequential) -> nn.Sequential:
    changed = [name for name, _ in model.named_buffers()]
    model.forward = CheckpointedForward(model, changed_buffers=changed)
    return model


def in_segments(model: nn.Sequential) -> nn.Sequential:
    inner = CheckpointRegion((), ("1", "2"))
    outer = CheckpointRegion((), ("0", "1", "2"), inner=(inner,))
    segments = [outer, CheckpointRegion((), ("3", "4"))]
    changed = [name for name, _ in model.named_buffers()]
    model.forward = SegmentedForward(model, segments=segments, rewound=changed)
    return model


def backward_twice(model: nn.Module) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    output = model(torch.randn(4, 8))
    output.sum().backward(retain_graph=True)
    output.square().mean().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def with_other_parameters(model: nn.Module) -> list[torch.Tensor | None]:
    """As an inner step of MAML: with tensors that are gone from the module after the call."""
    torch.manual_seed(1)
    fast = {name: p + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    functional_call(model, fast, (torch.randn(4, 8),)).square().mean().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def with_other_attributes(model: nn.Module) -> list[torch.Tensor | None]:
    """They are set after the forward pass: for an evaluation, say, before the backward pass."""
    torch.manual_seed(1)
    output = model(torch.randn(4, 8))
    model.eval()
    model[1].eps, model[2].approximate = 0.5, "tanh"
    output.square().mean().backward()
    assert (model[1].training, model[1].eps, model[2].approximate) == (False, 0.5, "tanh")
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("step", [backward_twice, with_other_parameters, with_other_attributes])
@pytest.mark.parametrize("checkpointed", [whole, in_segments])
def test_as_without_checkpoints(
    step: Callable[[nn.Module], list[torch.Tensor | None]],
    checkpointed: Callable[[nn.Sequential], nn.Sequential],
) -> None:
    plain = net()
    model = checkpointed(copy.deepcopy(plain))
    parameters = [*model.parameters()]
    assert_equal(step(plain), step(model))
    assert all(p is before for p, before in zip(model.parameters(), parameters, strict=True))


def test_a_second_backward_pass_needs_results_that_are_freed() -> None:
    model = net()
    name = "aten.gelu.default"
    saved = SavedCalls(
        "block", saved={name: frozenset({0})}, without_first={}, skipped={}, n_calls={name: 1}
    )
    model.forward = CheckpointedForward(model, saved=saved)
    with pytest.raises(RuntimeError, match=r"second time through block, .* retain_graph"):
        backward_twice(model)


class Decaying(nn.Module):
    """Multiplies by a tensor that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return self.layer(x * self.scale).square()


def test_a_changed_tensor_with_a_gradient_is_recomputed_alike() -> None:
    """`functional_call` puts tensors with a history in the place of parameters and buffers."""

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        scale = torch.full((8,), 3.0, requires_grad=True)
        output = functional_call(model, {"scale": 2 * scale}, (torch.ones(4, 8),))
        output.sum().backward()
        return [scale.grad, *(p.grad for p in model.parameters())]

    plain = Decaying()
    model = copy.deepcopy(plain)
    model.forward = CheckpointedForward(model, rewound=["scale"])
    assert_equal(step(plain), step(model))


def test_a_whole_module_is_recomputed_unless_it_has_changed_parameters() -> None:
    x, plain = torch.ones(4, 8), Decaying()
    model = copy.deepcopy(plain)
    for _ in range(2):
        outputs = [plain(x), checkpointed_as_whole(model, model.forward, (x,), {})]
        for _ in range(2):
            gradients = [
                torch.autograd.grad(output.sum(), [*each.parameters()], retain_graph=True)
                for output, each in zip(outputs, (plain, model), strict=True)
            ]
            assert_equal(*gradients)
        assert_equal(plain.scale, model.scale)
    del model.scale
    model.scale = nn.Parameter(torch.ones(8), requires_grad=False)
    output = checkpointed_as_whole(model, model.forward, (x,), {})
    with pytest.raises(RuntimeError, match="forward changes the parameter 'scale'"):
        output.sum().backward()
    assert_equal(model.scale, torch.full((8,), 0.5))


@pytest.mark.distributed
def test_a_changed_distributed_buffer_changes_once() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Decaying()
        for name in ("weight", "bias"):
            whole = distribute_tensor(getattr(model.layer, name).detach(), mesh)
            setattr(model.layer, name, nn.Parameter(whole))
        model.scale = distribute_tensor(model.scale, mesh)
        model.forward = CheckpointedForward(model, changed_buffers=["scale"])
        model(distribute_tensor(torch.ones(4, 8), mesh)).sum().backward()
        assert_equal(model.scale.to_local(), torch.full((8,), 0.5))
    finally:
        dist.destroy_process_group()
