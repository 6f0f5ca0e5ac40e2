"""Checkpoints around what draws from generators that are not torch's default ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint_solver.export import to_torch_checkpoint
from graphs.model_calls import TraceError
from scheduler_runtime import apply
from scheduler_runtime.by_submodule.planning import FallbackError, plan_chain
from scheduler_runtime.execute import CheckpointedForward
from solver.solving import solve
from tests.support.bitwise import assert_equal

WIDTH = 32


def from_python(_block: Any, shape: torch.Size) -> torch.Tensor:
    return torch.full(shape, random.random())


def from_numpy(_block: Any, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(np.random.rand(*shape)).float()


def from_own_of_python(block: Any, shape: torch.Size) -> torch.Tensor:
    return torch.full(shape, block.of_python.random())


def from_own_of_numpy(block: Any, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(block.of_numpy.random(shape)).float()


def from_own_of_torch(block: Any, shape: torch.Size) -> torch.Tensor:
    return torch.rand(shape, generator=block.of_torch)


SOURCES = (from_python, from_numpy, from_own_of_python, from_own_of_numpy, from_own_of_torch)


class Block(nn.Module):
    def __init__(self, draw: Callable[[Any, torch.Size], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.draw = draw
        self.of_python, self.of_numpy = random.Random(0), np.random.default_rng(0)
        self.of_torch = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return x + self.down(hidden * self.draw(self, hidden.shape))


def generator_states(model: nn.Module) -> list[Any]:
    """The states of the global generators, and of those of the model."""
    found: list[Any] = [random.getstate(), np.random.get_state()[1].tolist()]
    for block in model.modules():
        if isinstance(block, Block):
            found.append(block.of_python.getstate())
            found.append(block.of_numpy.bit_generator.state)
            found.append(block.of_torch.get_state().tolist())
    return found


def gradients_and_states(model: nn.Module, batch: torch.Tensor) -> tuple[list[bytes], list[Any]]:
    """Of two steps. The global generators are seeded; those of the model go on."""
    random.seed(0)
    np.random.seed(0)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(batch).sum().backward()
        found += [p.grad.numpy().tobytes() for p in model.parameters()]
    return found, generator_states(model)


def blocks_of(draw: Callable[[Any, torch.Size], torch.Tensor]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(draw) for _ in range(4))), torch.randn(64, WIDTH)


@pytest.mark.parametrize("draw", SOURCES)
def test_a_recomputation_draws_the_numbers_of_the_forward_pass(draw: Any) -> None:
    plain, batch = blocks_of(draw)
    model = copy.deepcopy(plain)
    for block in model:
        block.forward = CheckpointedForward(block)
    expected = gradients_and_states(plain, batch)
    assert gradients_and_states(copy.deepcopy(model), batch) == expected
    assert gradients_and_states(model, batch) == expected


@pytest.mark.parametrize("draw", SOURCES[2:])
def test_generators_that_training_replaces_are_those_of_the_recomputation(draw: Any) -> None:
    """They may be seeded anew in each epoch, after the first calls."""
    plain, batch = blocks_of(draw)
    model = copy.deepcopy(plain)
    for block in model:
        block.forward = CheckpointedForward(block)
    for epoch in range(3):
        found = []
        for each in (plain, model):
            for block in each:
                block.of_python, block.of_numpy = random.Random(epoch), np.random.default_rng(epoch)
                block.of_torch = torch.Generator().manual_seed(epoch)
            found.append(gradients_and_states(each, batch))
        assert found[0] == found[1]


class InTurn(nn.ModuleList):
    """Neighbours under a forward of its own are checkpointed one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("draw", SOURCES)
@pytest.mark.parametrize("container", [nn.Sequential, InTurn])
def test_plan_chain_keeps_the_numbers_and_the_generators(draw: Any, container: Any) -> None:
    blocks, batch = blocks_of(draw)
    model = container(*blocks) if container is nn.Sequential else container(blocks)
    expected = gradients_and_states(copy.deepcopy(model), batch)
    before = generator_states(model)
    options: dict[str, Any] = {"loss": lambda output, _batch: output.sum()}
    whole = plan_chain(model, batch, budget="1GB", **options)
    budget = int(0.8 * whole.baseline.peak_bytes)
    solution = plan_chain(model, batch, budget=budget, **options)
    assert generator_states(model) == before
    assert solution.checkpointed
    apply(model, solution)
    assert gradients_and_states(model, batch) == expected


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("draw", SOURCES)
def test_an_exported_part_that_could_not_be_traced_draws_the_same_numbers(draw: Any) -> None:
    blocks, batch = blocks_of(draw)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks)
    expected = gradients_and_states(copy.deepcopy(model), batch)
    options: dict[str, Any] = {"loss": lambda output, _batch: output.sum()}
    whole = solve(model, batch, budget="1GB", **options)
    assert whole.graph.meta.opaque_parts
    solution = solve(model, batch, budget=int(0.85 * whole.baseline.peak_bytes), **options)
    exported = to_torch_checkpoint(model, solution, on_excess="least")
    assert exported.modules
    assert gradients_and_states(model, batch) == expected


MAKERS: dict[str, Callable[[], Any]] = {
    "of_python": lambda: random.Random(0),
    "of_numpy": lambda: np.random.default_rng(0),
    "of_torch": lambda: torch.Generator().manual_seed(0),
}


class MakesItsGenerator(Block):
    """Makes the generator that it draws from: in its first call, or in each."""

    def __init__(self, name: str, *, in_each_call: bool = False) -> None:
        super().__init__(globals()[f"from_own_{name}"])
        self.name, self.in_each_call = name, in_each_call
        delattr(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_each_call or not hasattr(self, self.name):
            setattr(self, self.name, MAKERS[self.name]())
        return super().forward(x)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MAKERS)
def test_a_generator_that_the_first_call_makes_is_not_replayed(name: str) -> None:
    torch.manual_seed(0)
    block, batch = MakesItsGenerator(name), torch.randn(64, WIDTH)
    block.forward = CheckpointedForward(block)
    with pytest.raises(TraceError, match=rf"forward makes the \w+\.\w+ in '{name}' and keeps it"):
        gradients(block, batch)


@pytest.mark.parametrize("name", MAKERS)
def test_a_generator_that_each_call_makes_draws_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    block, batch = MakesItsGenerator(name, in_each_call=True), torch.randn(64, WIDTH)
    model = copy.deepcopy(block)
    model.forward = CheckpointedForward(model)
    for _ in range(2):
        assert_equal(gradients(block, batch), gradients(model, batch))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", MAKERS)
def test_plan_chain_refuses_a_model_whose_first_call_makes_a_generator(name: str) -> None:
    """It takes one that was called before, as the error advises."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MakesItsGenerator(name) for _ in range(4))), torch.randn(64, 32)
    options: dict[str, Any] = {"loss": lambda output, _batch: output.sum()}
    with pytest.raises(FallbackError, match=r"call the model once before planning"):
        plan_chain(model, batch, budget="1GB", **options)
    assert not any(hasattr(block, name) for block in model)
    model(batch)
    plain_bytes = plan_chain(model, batch, budget="1GB", **options).baseline.peak_bytes
    solution = plan_chain(model, batch, budget=int(0.8 * plain_bytes), **options)
    plain = copy.deepcopy(model)
    if name == "of_torch":  # a copy shares the generator
        for block in plain:
            block.of_torch = torch.Generator().set_state(block.of_torch.get_state())
    apply(model, solution)
    assert_equal(gradients(plain, batch), gradients(model, batch))
