"""Measure tensor-parallel steps with plans: processes that test_tensor_parallel.py starts.

    python -m tests.support.tensor_ranks 2 colwise sequence

Each rank runs steps of the module with and without plans, and prints one line of JSON for each
plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from examples.integrations.tensor_parallel import WIDTH, FeedForward
from examples.integrations.two_processes import rank_peak_bytes, run
from scheduler_runtime import apply, fit
from scheduler_runtime.fitting import plans_of
from solver import Solution, solve
from tests.support.bitwise import are_equal

N_HEADS, N_BLOCKS, ROWS = 4, 1, 4


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in "qkv")
        self.out = nn.Linear(width, width)
        self.head_width = width // n_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            of(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for of in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, n_heads), FeedForward(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.feed_forward(self.norm(x)))


class Transformer(nn.Module):
    """A small transformer that returns the loss of the next tokens."""

    def __init__(
        self, n_tokens: int, n_blocks: int = N_BLOCKS, width: int = WIDTH, n_heads: int = N_HEADS
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads) for _ in range(n_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_tokens, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def colwise(n_blocks: int = N_BLOCKS) -> dict[str, Any]:
    """Plan for `parallelize_module`: each block's matrices are split, the rest is the same on all
    ranks."""
    plan: dict[str, Any] = {}
    for i in range(n_blocks):
        of_block = f"blocks.{i}"
        plan |= {f"{of_block}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan[f"{of_block}.feed_forward.up"] = ColwiseParallel()
        plan |= {
            f"{of_block}.{name}": RowwiseParallel()
            for name in ("attention.out", "feed_forward.down")
        }
    return plan


def sequence(n_blocks: int = N_BLOCKS) -> dict[str, Any]:
    """Plan for `parallelize_module`: as `colwise`, and between the split matrices each rank has a
    part of the sequence; embedding and head are split, too."""

    def whole_sequence() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    plan = colwise(n_blocks) | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(n_blocks):
        of_block = f"blocks.{i}"
        plan |= {
            f"{of_block}.attention_norm": SequenceParallel(),
            f"{of_block}.norm": SequenceParallel(),
            f"{of_block}.attention": whole_sequence(),
            f"{of_block}.feed_forward": whole_sequence(),
            f"{of_block}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{of_block}.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


@dataclasses.dataclass(frozen=True)
class Case:
    """A case.

    styles: returns the plan for `parallelize_module`.
    n_tokens: size of the vocabulary.
    length: tokens of a sequence.
    shares: the budgets, as shares of the range from the least budget (0) to the peak without a plan
        (1). The last budget is given to `fit`, the others are planned with `solve`.
    """

    styles: Callable[[], dict[str, Any]]
    n_tokens: int = 256
    length: int = 64
    shares: tuple[float, ...] = (0.85, 0.6, 0.35)

    def model(self, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(Transformer(self.n_tokens), mesh, self.styles())

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch, the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.n_tokens, (ROWS, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def solutions(self, mesh: DeviceMesh) -> list[Solution]:
        """Plans for the budgets, made on the meta device."""
        with torch.device("meta"):
            model = self.model(mesh)
        batch = tuple(each.to("meta") for each in self.batch(0))
        refused = solve(model, batch, budget=1, optimizer=torch.optim.AdamW)
        least_bytes, plain_bytes = refused.minimum_budget_bytes, refused.baseline.peak_bytes
        return [
            solve(
                model,
                batch,
                budget=int(least_bytes + share * (plain_bytes - least_bytes)),
                optimizer=torch.optim.AdamW,
            )
            for share in self.shares
        ]


CASES = {
    "colwise": Case(colwise),
    "sequence": Case(sequence),
    "chunked": Case(colwise, n_tokens=4096, length=256, shares=(0.1,)),
}


def model_of(case: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case].model(mesh)


def trained(case: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train three steps. Returns the losses and this rank's parts of the gradients of each step,
    and its parts of the final parameters."""
    torch.manual_seed(7)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*CASES[case].batch(step))
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        results += [loss.detach(), *(_part(each).clone() for each in gradients)]
        optimizer.step()
    return [*results, *(_part(each).detach().clone() for each in model.parameters())]


def _part(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().clone()  # waits if the part is still being communicated


def placements_of(model: nn.Module) -> list[Any]:
    return [getattr(p.grad, "placements", None) for p in model.parameters()]


def work(rank: int, *, n_ranks: int, cases: Sequence[str]) -> None:
    mesh = init_device_mesh("cpu", (n_ranks,))
    for case in cases:
        plain = model_of(case, mesh)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        expected, placed = trained(case, plain, optimizer), placements_of(plain)
        plans = CASES[case].solutions(mesh)
        plain_bytes = rank_peak_bytes(
            plain, optimizer, CASES[case].batch(0), predicted_bytes=plans[0].baseline.peak_bytes
        )
        for index, solution in enumerate(plans):
            assert solution.simulation is not None, solution
            model = model_of(case, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with_fit = index == len(plans) - 1
            if with_fit:
                fit(model, budget=solution.request.budget_bytes, optimizer=optimizer)
            else:
                apply(model, solution)
            got = trained(case, model, optimizer)
            if with_fit:
                (solution,) = (each.solution for each in plans_of(model))
                assert solution.simulation is not None
            found = {
                "case": case,
                "rank": rank,
                "same": are_equal(expected, got),
                "same_placements": placements_of(model) == placed,
                "n_results": len(got),
                "n_recomputed": solution.simulation.n_recomputed,
                "rewrites": list(solution.graph.meta.rewrites),
                "plain_measured_bytes": plain_bytes,
                "plain_predicted_bytes": solution.baseline.peak_bytes,
                "measured_bytes": rank_peak_bytes(
                    model,
                    optimizer,
                    CASES[case].batch(0),
                    predicted_bytes=solution.simulation.peak_bytes,
                ),
                "predicted_bytes": solution.simulation.peak_bytes,
            }
            os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


if __name__ == "__main__":
    n, names = int(sys.argv[1]), sys.argv[2:] or tuple(CASES)
    run(functools.partial(work, n_ranks=n, cases=names), n_processes=n)
