"""Models whose layers can be traced, except for one part, which cannot for some reason or other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS = 32, 256


class Experts(nn.Module):
    """Mixture of experts: each gets the rows that the router chooses for it, found by `where`, so
    that shapes depend on data."""

    def __init__(self, width: int = WIDTH, n_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, n_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(n_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if len(rows):
                made = expert(x[rows]) * weights[rows, place, None]
                out = out.index_add(0, rows, made.to(out.dtype))
        return out


class Masked(nn.Module):
    """Works on the rows that a boolean mask picks, and writes them back."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.mean(-1) > 0
        out = x.clone()
        out[mask] = self.down(F.gelu(self.up(x[mask])))
        return out


class Branching(nn.Module):
    """A branch on a computed value, with batch norm and dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if hidden.mean().item() > 10:
            hidden = 2 * hidden
        return self.drop(self.down(hidden))


class MakesLeaf(Branching):
    """Adds to a tensor that requires a gradient and that it makes (a sum of losses begun at 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros([], requires_grad=True)


class _InNumpy(torch.autograd.Function):
    """Like a kernel of another library: cannot be traced in forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() * (1 - np.tanh(x.detach().numpy()) ** 2))


class OwnKernel(nn.Module):
    """A custom autograd function."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_InNumpy.apply(self.up(x)))


class NumPyFilter(nn.Module):
    """A filter that NumPy computes in every forward pass."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        decay = np.exp(-np.abs(x.detach().numpy()).mean(0))
        return torch.tanh(x * self.scale) * torch.from_numpy(decay)


class Recurrent(nn.Module):
    """nn.LSTM, whose operator hides its workspace; it returns a tuple."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x.view(8, -1, x.shape[-1]))
        return (out + hidden[0][:, None]).reshape(x.shape)


class Dropping(nn.Module):
    """Skips its layers at random, by Python's random generator."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        keep = random.random() < 0.5 + 0 * float(x.sum().detach() > 0)
        return self.down(torch.relu(self.up(x))) if keep else torch.zeros_like(x)


class SeveralUses(nn.Module):
    """Reads its input, which is also read outside, several times; returns a tuple with None."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None, dict[str, Tensor]]:
        sign = 1 if x.sum().item() > -1e9 else -1
        return (self.a(x) * self.b(x)).sin() * scale, None, {"c": self.c(x) * sign}


class Hooked(nn.Module):
    """One linear layer has a forward hook that scales its output, another a backward hook."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.up.register_forward_hook(lambda _module, _args, output: output * 0.5)
        self.down.register_full_backward_hook(lambda _module, given, _out: (given[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Sampling(nn.Module):
    """Draws rows with NumPy, as BigBird's sparse attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.from_numpy(np.random.permutation(len(x)))
        return torch.tanh(self.linear(x))[rows]


class Network(nn.Module):
    """Blocks, each with traceable layers and an opaque part.

    part: makes an opaque part.
    shared: all blocks share one part.
    """

    def __init__(
        self, part: Callable[[], nn.Module], *, n_blocks: int = 4, shared: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(n_blocks))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(n_blocks)
        )
        one = part()
        self.parts = nn.ModuleList(one if shared else part() for _ in range(n_blocks))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, part, mlp in zip(self.norms, self.parts, self.mlps, strict=True):
            made = part(x)
            if isinstance(made, tuple):
                made = made[0] + made[2]["c"]
            x = x + made
            x = x + self.drop(mlp(norm(x)))
        return F.cross_entropy(self.head(x), tokens)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "boolean mask": Masked,
    "branch": Branching,
    "own leaf": MakesLeaf,
    "autograd function": OwnKernel,
    "NumPy": NumPyFilter,
    "LSTM": Recurrent,
    "LayerDrop": Dropping,
    "several uses": SeveralUses,
    "hooks": Hooked,
    "numpy.random": Sampling,
}


def network(name: str, *, seed: int = 0, **options: Any) -> tuple[nn.Module, Tensor]:
    """A Network with the part of this name (see PARTS), and a batch."""
    # also those that parts draw from: a plan holds for what a part took when it was traced
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed)
    return Network(PARTS[name], **options), torch.randint(0, 50, (ROWS,))


class Probabilities(nn.Module):
    """Returns the tensor that its last operator saves; if a value is high, in another memory
    layout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y[0, 0].item() > 100:
            return torch.sigmoid(y.t().contiguous())
        return torch.sigmoid(y).t()


class Mean(nn.Module):
    """The mean square of its input, as the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Distilled(nn.Module):
    """A student and a teacher that runs without gradients; the teacher's result depends on whether
    gradients are enabled."""

    class Teacher(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x))
            if y.sum().item() > 1e9:
                y = y + 1
            return 2 * y if torch.is_grad_enabled() else y

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.teacher, self.student = self.Teacher(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


class WithTable(Masked):
    """Also saves a constant for backward, which is live anyway."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.table = torch.rand(100 * ROWS, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table[: len(x)])
