"""Random small modules, to search for a training step that a plan changes in any bit.

A module is a straight line of operations on values of one shape (rows x width). Each operation may
read any earlier value. So there are long skips, values that are read once or never, shared layers,
views, in-place changes, dropout, buffers that change, and dead branches. The loss is computed from
the last value; it may be row-wise over so many classes that plans compute it in row chunks.
"""

from __future__ import annotations

import dataclasses
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
    layer: index of the layer to use, for operations that have layers.
    reads: indices of the values that it reads.
    """

    operation: str
    layer: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """What a module does. Two modules of the same recipe and random seed are the same.

    steps: the operations; step k makes value k + 1.
    returned: indices of the values that are returned beside the loss.
    frozen: indices of the linear layers without gradients.
    n_layers: how many layers there are of each kind.
    n_rows: rows of the batch.
    wide_loss: name of a loss over `n_classes` in WIDE_LOSSES, or "" for the mean square.
    """

    steps: tuple[Step, ...]
    returned: tuple[int, ...]
    frozen: tuple[int, ...]
    n_layers: int = 2
    n_rows: int = N_ROWS
    wide_loss: str = ""
    n_classes: int = 0


class RandomModule(nn.Module):
    """Runs a recipe. Returns the loss, or a dict of the loss and the other returned values."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        layers = range(recipe.n_layers)
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.norm = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in layers)
        self.scale = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in layers)
        self.register_buffer("seen", torch.zeros(WIDTH))
        if recipe.wide_loss:
            self.head = nn.Linear(WIDTH, recipe.n_classes)
            targets = torch.randint(recipe.n_classes, (recipe.n_rows,))
            targets[::7] = IGNORED
            self.register_buffer("targets", targets)
        for index in recipe.frozen:
            self.linear[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        values = [torch.tanh(self.linear[0](x))]
        for step in self.recipe.steps:
            read = [values[index] for index in step.reads]
            values.append(OPERATIONS[step.operation](self, step.layer, read))
        if self.recipe.wide_loss:
            last = WIDE_LOSSES[self.recipe.wide_loss](self.head(values[-1]), self.targets)
        else:
            last = values[-1].square().mean()
        loss = last + sum(value.mean() for value in values[::3]) * 0.1
        if not self.recipe.returned:
            return loss
        others = {f"value {index}": values[index] for index in self.recipe.returned}
        return {"loss": loss, **others}


Operation = Callable[[RandomModule, int, Values], torch.Tensor]


def _read_and_change_buffer(module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """Reads a buffer, then changes it."""
    result = values[0] + module.seen
    module.seen.add_(values[0].detach().mean(0) * 0.1)
    return result


def _write_in_place(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """Writes a part of a new tensor in place."""
    result = values[0].clone()
    result[:, : WIDTH // 2] += values[-1][:, WIDTH // 2 :]
    return result


def _assemble(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """Writes a tensor part by part, reads it, and writes a part again."""
    result = torch.zeros_like(values[0])
    result[:, : WIDTH // 2] = values[0][:, WIDTH // 2 :]
    result[:, WIDTH // 2 :].copy_(torch.tanh(values[1][:, : WIDTH // 2]))
    mean = result.mean(1, keepdim=True)
    result[1:3] = values[2][:2]
    return result + mean


def _use_scratch(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
    """Uses the same memory for two results, neither of which the backward pass needs."""
    scratch = torch.empty_like(values[0])
    with torch.no_grad():
        for row, value in enumerate(values[1]):
            torch.mul(value, 2.0, out=scratch[row])
        largest = scratch.amax(1, keepdim=True)
        scratch[:, ::2] -= largest
        scratch.diagonal().mul_(0.5)
        smallest = scratch.amin(1, keepdim=True)
    return values[0] + 0.1 * largest + 0.1 * smallest


def _attend(_module: RandomModule, _layer: int, values: Values) -> torch.Tensor:
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
    "count": _read_and_change_buffer,
    "written": _write_in_place,
    "assembled": _assemble,
    "scratch": _use_scratch,
    "attended": _attend,
}


def _cross_entropy_by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy written by hand, as preference losses do: the log-probability of each row's
    class, masked and summed."""
    chosen = torch.log_softmax(logits, -1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return -(chosen * (targets != IGNORED)).sum() / len(targets)


def _teacher_loss(logits: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    teacher = torch.softmax(logits.detach().flip(0), -1)
    return -(teacher * torch.log_softmax(logits, -1)).sum(-1).mean()


IGNORED = -100
WIDE_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": F.cross_entropy,
    "smoothed": lambda logits, targets: F.cross_entropy(logits, targets, label_smoothing=0.1),
    "colder sum": lambda logits, targets: F.cross_entropy(logits / 0.7, targets, reduction="sum"),
    "rows": lambda logits, targets: F.cross_entropy(logits, targets, reduction="none").tanh().sum(),
    "z-loss": lambda logits, targets: (
        F.cross_entropy(logits, targets) + 1e-3 * torch.logsumexp(logits, -1).square().mean()
    ),
    "by hand": _cross_entropy_by_hand,
    "teacher": _teacher_loss,
}


def random_recipe(rng: random.Random, *, wide: bool = False) -> Recipe:
    """A recipe of 3 to 16 operations. wide: with a loss over many classes."""
    steps = []
    for index in range(rng.randint(3, 16)):
        # Most values read the latest ones; some reach far back.
        reads = tuple(index if rng.random() < 0.6 else rng.randrange(index + 1) for _ in range(3))
        steps.append(Step(rng.choice(list(OPERATIONS)), rng.randrange(2), reads))
    n_values = len(steps) + 1
    returned = rng.sample(range(n_values), rng.choice([0, 0, 1, 2]))
    frozen = (1,) if rng.random() < 0.2 else ()
    recipe = Recipe(tuple(steps), tuple(sorted(returned)), frozen)
    if not wide:
        return recipe
    return dataclasses.replace(
        recipe,
        n_rows=rng.choice([256, 300, 385, 512]),
        wide_loss=rng.choice(list(WIDE_LOSSES)),
        n_classes=rng.choice([16384, 17001]),
    )


def recipe_text(recipe: Recipe) -> str:
    """The recipe as text, for reports."""
    steps = "; ".join(
        f"v{index} = {step.operation} {step.layer} of "
        + ", ".join(f"v{read}" for read in step.reads)
        for index, step in enumerate(recipe.steps, 1)
    )
    if not recipe.wide_loss:
        return steps
    return f"{steps}; {recipe.wide_loss} of {recipe.n_rows} x {recipe.n_classes}"
