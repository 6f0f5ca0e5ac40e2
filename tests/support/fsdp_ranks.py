"""Measure the memory of ranks of FSDP2: the processes that tests/graphs/fsdp/test_fsdp.py starts.

    python -m tests.support.fsdp_ranks 2               # two ranks, the cases in QUICK
    python -m tests.support.fsdp_ranks 4 tied deep     # four ranks, these cases
    python -m tests.support.fsdp_ranks 4 hybrid 'hybrid kept'

Each rank prints one line of JSON for each case and plan.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from examples import gpt2
from examples.integrations.two_processes import rank_peak_bytes, run, train
from graphs.costs import Measured
from graphs.fsdp import MixedPrecision, Sharding
from graphs.trace import trace_variants
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.fsdp import shard
from solver.schedule import Request
from solver.schedule.solution import Solution, simulate_unplanned
from solver.solving import answer
from tests.support.bitwise import are_equal
from tests.support.opaque_models import Experts

SIZES = {"batch_size": 4, "seq_length": 64, "n_tokens": 512}


def tied() -> nn.Module:
    """Embedding and head share one parameter, in the root's group."""
    return _gpt2(n_layers=4, width=64)


def frozen() -> nn.Module:
    """The lower half is frozen: FSDP2 prefetches its parameters in backward and never uses them,
    and the first trained block's gradients are reduced last."""
    model = _gpt2(n_layers=4, width=96)
    parts = [model.token_embedding, model.position_embedding, *model.blocks[:2]]
    for part in parts:
        part.requires_grad_(False)
    return model


def adapters() -> nn.Module:
    """Only one matrix of each block and the position embedding are trained; the width is not a
    power of two."""
    model = _gpt2(n_layers=3, width=60, n_heads=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("qkv" in name or "position" in name)
    return model


def wide() -> nn.Module:
    """Parameters take most of the memory, so that the peak is where they are gathered."""
    return _gpt2(n_layers=3, width=192)


def logits() -> nn.Module:
    """Most of the memory is taken by the loss, which the export computes in row chunks."""
    return _gpt2(n_layers=2, width=32, n_tokens=16384)


class Towers(nn.Module):
    """Under mixed precision, blocks return another dtype than they compute in. The loss is computed
    from the last block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens)).square().mean() + 0.0 * targets.sum()


def towers() -> nn.Module:
    torch.manual_seed(0)
    return Towers()


class Rows(nn.Module):
    """Experts on the rows of all sequences: a part that cannot be traced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x.flatten(0, -2)).view(x.shape)


def experts() -> nn.Module:
    """Each block has a part that is planned as one piece."""
    model = _gpt2(n_layers=3, width=64)
    for block in model.blocks:
        block.mlp_norm = nn.Sequential(block.mlp_norm, Rows(64))
    return model


def _gpt2(*, n_tokens: int = 512, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_heads": 4, **sizes}
    return gpt2.get_model(n_tokens=n_tokens, max_length=64, dropout=0.1, **sizes)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "tied": (tied, (0.55,)),
    "frozen": (frozen, (0.85,)),
    "adapters": (adapters, (0.6,)),
    "wide": (wide, ()),
    "deep": (tied, (0.4,)),
    "logits": (logits, (0.7,)),
    "kept": (wide, (0.7,)),
    "hybrid": (wide, (0.7,)),
    "hybrid kept": (wide, ()),
    "mixed": (tied, (0.6,)),
    "mixed wide": (wide, (0.7,)),
    "mixed adapters": (adapters, (0.6,)),
    "mixed uncast": (wide, (0.7,)),
    "mixed output": (towers, (0.6,)),
    "hybrid mixed": (wide, (0.7,)),
    "summed": (tied, (0.6,)),
    "summed wide": (wide, (0.7,)),
    "mixed summed": (tied, (0.6,)),
    "mixed summed wide": (wide, (0.7,)),
    "experts": (experts, (0.85,)),
    "mixed experts": (experts, (0.85,)),
}
SUMMED = ("summed", "summed wide", "mixed summed", "mixed summed wide")
"""Cases with three micro-batches, of which only the last reduces gradients."""
KEPT, HYBRID = ("kept", "hybrid kept"), ("hybrid", "hybrid kept", "hybrid mixed")
"""Cases that keep parameters gathered from forward to backward; cases with two replicas, each of
half of the ranks."""
MIXED = {
    "mixed": MixedPrecision("bfloat16", "float32"),
    "mixed wide": MixedPrecision("bfloat16", "float32"),
    "mixed adapters": MixedPrecision("bfloat16"),
    "mixed uncast": MixedPrecision("float64", "float32", cast_forward_inputs=False),
    "mixed output": MixedPrecision("bfloat16", "bfloat16", output_dtype="float32"),
    "hybrid mixed": MixedPrecision("bfloat16", "float32"),
    "mixed summed": MixedPrecision("bfloat16", "float32"),
    "mixed summed wide": MixedPrecision("bfloat16", "float32"),
    "mixed experts": MixedPrecision("bfloat16", "float32"),
}
QUICK = ("tied", "frozen", "adapters", "wide", "kept")
"""Cases to run if none are given: those that are planned quickly."""


class Summing(nn.Module):
    """Runs two micro-batches without gradient reduction before the forward pass of the caller's, so
    that a step accumulates three."""

    def __init__(self, sharded: Any) -> None:
        super().__init__()
        self.sharded = sharded

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        self.sharded.set_requires_gradient_sync(False)
        for _ in range(2):
            self.sharded(*batch).backward()
        self.sharded.set_requires_gradient_sync(True)
        return self.sharded(*batch)


def sharding_of_case(case: str, *, n_ranks: int) -> Sharding:
    n_replicas = 2 if case in HYBRID else 1
    return Sharding(
        n_ranks=n_ranks // n_replicas,
        n_replicas=n_replicas,
        reshard_after_forward=case not in KEPT,
        mp_policy=MIXED.get(case),
        accumulates_whole=case in SUMMED,
    )


def plans(case: str, *, n_ranks: int) -> list[Solution]:
    """Plans for the peak without a plan, and for smaller budgets: the resident bytes plus shares of
    what the step takes above them."""
    build, shares = CASES[case]
    sharding = sharding_of_case(case, n_ranks=n_ranks)
    # on a CPU, temporaries of matrix products in bfloat16 are only known by measuring
    costs = Measured("cpu", n_runs=1) if case in MIXED else None
    step = trace_variants(
        build(),
        gpt2.get_batch(**SIZES),
        optimizer=torch.optim.AdamW,
        gradients="accumulate" if case in SUMMED else "fresh",
        fsdp=sharding,
        costs=costs,
        rewrites="bitwise" if case == "logits" else "none",
    )
    resident_bytes = step.plain.resident_bytes
    above_bytes = simulate_unplanned(step.plain).peak_bytes - resident_bytes
    budgets = (int(resident_bytes + share * above_bytes) for share in (1.0, *shares))
    return [answer(step, Request(budget, time_limit_s=600)) for budget in budgets]


def work(rank: int, *, n_ranks: int, solutions: dict[str, Sequence[Solution]]) -> None:
    whole = init_device_mesh("cpu", (n_ranks,))
    halves = whole
    if not {*solutions}.isdisjoint(HYBRID):
        names = ("replicate", "shard")
        halves = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=names)
    for case, of_case in solutions.items():
        mesh = halves if case in HYBRID else whole
        model = CASES[case][0]()
        expected: list[torch.Tensor] = []
        for solution in of_case:
            planned = copy.deepcopy(model)
            exported = to_torch_checkpoint(planned, solution, on_excess="least")
            shard(planned, solution, mesh=mesh)
            if case in SUMMED:
                planned = Summing(planned)
            results, _ = train(planned, rank)
            expected = expected or results
            optimizer = torch.optim.AdamW(p for p in planned.parameters() if p.requires_grad)
            batch = gpt2.get_batch(**SIZES)
            planned(*batch).backward()
            optimizer.step()
            found = {
                "case": case,
                "rank": rank,
                "n_modules": len(exported.modules),
                "n_losses": exported.losses_in_chunks,
                "measured_bytes": rank_peak_bytes(
                    planned, optimizer, batch, predicted_bytes=exported.peak_bytes
                ),
                "predicted_bytes": exported.peak_bytes,
                "same": are_equal(expected, results),
            }
            os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


def main(n_ranks: int, cases: Sequence[str]) -> None:
    solutions = {case: plans(case, n_ranks=n_ranks) for case in cases}
    run(functools.partial(work, n_ranks=n_ranks, solutions=solutions), n_processes=n_ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or QUICK)
