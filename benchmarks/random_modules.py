"""Small modules put together at random, to look for a step that a plan changes in any bit.

A module is a straight line of operations on values of one shape (rows x width), each of which may
read any earlier value: so there are long skips, values read once or never, shared layers, views,
in-place changes, dropout, buffers that change, and branches that end nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

N_ROWS, WIDTH = 6, 8

Values = list[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One operation.

    operation: its name in OPERATIONS.
    layer: which layer of its kind.
    reads: earlier values.
    """

    operation: str
    layer: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """What a module does; two modules of one recipe and seed are the same."""

    steps: tuple[Step, ...]
    returned: tuple[int, ...]
    frozen: tuple[int, ...]
    n_layers: int = 2


class RandomModule(nn.Module):
    """Runs a recipe. Returns the loss, or a dict with other outputs beside it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        layers = range(recipe.n_layers)
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.norm = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in layers)
        self.scale = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in layers)
        self.register_buffer("seen", torch.zeros(WIDTH))
        for index in recipe.frozen:
            self.linear[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        values = [torch.tanh(self.linear[0](x))]
        for step in self.recipe.steps:
            read = [values[index] for index in step.reads]
            values.append(OPERATIONS[step.operation](self, step.layer, read))
        loss = values[-1].square().mean() + sum(value.mean() for value in values[::3]) * 0.1
        if not self.recipe.returned:
            return loss
        others = {f"value {index}": values[index] for index in self.recipe.returned}
        return {"loss": loss, **others}


Operation = Callable[[RandomModule, int, Values], torch.Tensor]


def _count(module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """Reads a buffer, then changes it."""
    result = values[0] + module.seen
    module.seen.add_(values[0].detach().mean(0) * 0.1)
    return result


def _written(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """A part of a new tensor is written in place."""
    result = values[0].clone()
    result[:, : WIDTH // 2] += values[-1][:, WIDTH // 2 :]
    return result


def _attended(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    query, key, value = (v[None, None] for v in values)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)[0, 0]


OPERATIONS: dict[str, Operation] = {
    "linear": lambda m, i, v: m.linear[i](v[0]),
    "norm": lambda m, i, v: m.norm[i](v[0]),
    "scale": lambda m, i, v: m.scale[i] * v[0],
    "add": lambda _m, _i, v: v[0] + v[1],
    "multiply": lambda _m, _i, v: torch.tanh(v[0] * v[1]),
    "product": lambda _m, _i, v: torch.tanh(v[0] @ v[1].t() @ v[2]),
    "tanh": lambda _m, _i, v: torch.tanh(v[0]),
    "gelu": lambda _m, _i, v: F.gelu(v[0]),
    "relu in place": lambda _m, _i, v: F.relu(v[0] + 0.1, inplace=True),
    "softmax": lambda _m, _i, v: torch.softmax(v[0], 1),
    "dropout": lambda _m, _i, v: F.dropout(v[0], 0.3),
    "noise": lambda _m, _i, v: v[0] + 0.1 * torch.randn_like(v[0]),
    "chosen": lambda _m, _i, v: torch.where(v[0] > 0, v[1], v[2]),
    "halves": lambda _m, _i, v: torch.cat(v[0].chunk(2, 1)[::-1], 1),
    "rows": lambda _m, _i, v: torch.stack([v[0], v[1]])[torch.tensor([1, 0])].sum(0),
    "turned": lambda _m, _i, v: v[0].t().contiguous().t() + v[1],
    "detached": lambda _m, _i, v: v[0] * v[1].detach(),
    "layer norm": lambda _m, _i, v: F.layer_norm(v[0], (WIDTH,)),
    "count": _count,
    "written": _written,
    "attended": _attended,
}


def random_recipe(choice: random.Random) -> Recipe:
    """A recipe of 3 to 16 operations."""
    steps = []
    for index in range(choice.randint(3, 16)):
        # Most values read the latest ones; some reach far back.
        reads = tuple(
            index if choice.random() < 0.6 else choice.randrange(index + 1) for _ in range(3)
        )
        steps.append(Step(choice.choice(list(OPERATIONS)), choice.randrange(2), reads))
    n_values = len(steps) + 1
    returned = choice.sample(range(n_values), choice.choice([0, 0, 1, 2]))
    frozen = (1,) if choice.random() < 0.2 else ()
    return Recipe(tuple(steps), tuple(sorted(returned)), frozen)


def described(recipe: Recipe) -> str:
    """For a report of a mismatch: the steps, one after the other."""
    return "; ".join(
        f"v{index} = {step.operation} {step.layer} of "
        + ", ".join(f"v{read}" for read in step.reads)
        for index, step in enumerate(recipe.steps, 1)
    )
