"""Measure pipeline stages that FSDP2 shards: the processes that test_sharded_stages.py starts.

    python -m tests.support.sharded_stage_ranks 1f1b gpipe mixed

Four ranks: two stages of a small Llama, each sharded over two ranks. Each rank prints one line of
JSON for each case and plan.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from examples.integrations.two_processes import run
from graphs import Pipeline
from graphs.costs import Measured, cpu_peak_bytes
from graphs.fsdp import MixedPrecision, Sharding
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.fsdp import shard
from scheduler_runtime.measuring import no_garbage
from solver import Solution, solve
from tests.support.bitwise import are_equal

N_STAGES, N_SHARDS = 2, 2
N_TOKENS, WIDTH, N_HEADS, ROWS, LENGTH, N_BLOCKS = 128, 64, 4, 4, 32, 1
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass(frozen=True)
class Case:
    """A case.

    width: of the model; wide models have most of their memory in parameters.
    shares: the budgets: the resident bytes plus these shares of what a step without a plan takes
        above them.
    """

    schedule: str = "1f1b"
    n_microbatches: int = 4
    width: int = WIDTH
    shares: tuple[float, ...] = (1.0, 0.6)
    mp_policy: MixedPrecision | None = None


CASES = {
    "1f1b": Case(),
    "gpipe": Case("gpipe", n_microbatches=8),
    "wide": Case(width=192, shares=(1.0, 0.75)),
    "mixed": Case(mp_policy=MixedPrecision("bfloat16", "float32")),
}


class Block(nn.Module):
    """A Llama's block, with dropout: RMS norms, causal attention, a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (N_HEADS, -1)).transpose(-2, -3)
        q, k, v = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(-2, -3).flatten(-2)))
        y = self.norms[1](x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


def stage_of(index: int, case: Case) -> nn.Module:
    """The first stage has the embedding, the last the head."""
    torch.manual_seed(index)
    blocks: list[nn.Module] = [Block(case.width) for _ in range(N_BLOCKS)]
    if index == 0:
        return nn.Sequential(nn.Embedding(N_TOKENS, case.width), *blocks)
    return nn.Sequential(*blocks, nn.RMSNorm(case.width), nn.Linear(case.width, N_TOKENS))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def sent(case: Case, **options: Any) -> torch.Tensor:
    """A tensor like those that the first stage sends to the last, for one micro-batch."""
    dtype = torch.float32 if case.mp_policy is None else torch.bfloat16
    return torch.empty(ROWS, LENGTH, case.width, dtype=dtype, requires_grad=True, **options)


def plans(case: Case, index: int) -> list[Solution]:
    pipeline = Pipeline(index, N_STAGES, case.n_microbatches, case.schedule)
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.long, device="meta")
    options: dict[str, Any] = {
        "pipeline": pipeline,
        "optimizer": torch.optim.AdamW,
        "fsdp": Sharding(N_SHARDS, reshard_after_forward=False, mp_policy=case.mp_policy),
    }
    if case.mp_policy is not None:  # temporaries of products in bfloat16 are known by measuring
        options["costs"] = Measured("cpu", n_runs=1)
    batch: Any = tokens
    if pipeline.is_last:
        batch = (sent(case, device="meta"), tokens)
        options |= {"inputs": lambda b: b[0], "loss": lambda output, b: loss_of(output, b[1])}
    stage = stage_of(index, case).to("meta")
    plain = solve(stage, batch, budget=10**9, **options)
    resident_bytes = plain.graph.resident_bytes
    above_bytes = plain.baseline.peak_bytes - resident_bytes
    return [
        solve(plain.graph, budget=resident_bytes + int(share * above_bytes))
        for share in case.shares
    ]


def trained(stage: nn.Module, case: Case, mesh: DeviceMesh) -> tuple[list[torch.Tensor], int]:
    """Train three steps. Returns losses and this rank's parts of gradients and parameters, and the
    peak of its tensors in a further step."""
    index, column = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    is_last = index == N_STAGES - 1
    torch.manual_seed(10 + index)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.long)
    received = sent(case) if index else tokens
    dtype = received.dtype if index else sent(case).dtype
    logits = torch.empty(ROWS, LENGTH, N_TOKENS, dtype=dtype, requires_grad=True)
    runner = PipelineStage(
        stage,
        index,
        N_STAGES,
        torch.device("cpu"),
        input_args=received,
        output_args=logits if is_last else sent(case),
        group=mesh.get_group("pp"),
    )
    schedule = SCHEDULES[case.schedule](runner, n_microbatches=case.n_microbatches, loss_fn=loss_of)
    generator = torch.Generator().manual_seed(column)
    data = torch.randint(N_TOKENS, (case.n_microbatches * ROWS, LENGTH), generator=generator)
    results: list[torch.Tensor] = []

    def step() -> None:
        losses: list[torch.Tensor] = []
        if is_last:
            schedule.step(target=data, losses=losses, return_outputs=False)
        else:
            schedule.step(data)
        optimizer.step()
        results.extend(loss.detach() for loss in losses)

    for _ in range(3):
        optimizer.zero_grad()
        step()
        results += [part(p.grad).clone() for p in stage.parameters() if p.grad is not None]
    results += [part(p).detach().clone() for p in stage.parameters()]
    n_results, taken = len(results), []
    for _ in range(10):  # the least counts: gloo's threads may free their copies a moment late
        optimizer.zero_grad()
        with no_garbage(torch.device("cpu")):
            taken.append(cpu_peak_bytes(step).peak_bytes)
        del results[n_results:]
    buffers = [
        info.buffer
        for of_all in (runner.args_recv_info, runner.grad_recv_info)
        for infos in of_all.values()
        for info in infos
        if info.buffer is not None
    ]
    state = [part(item) for each in optimizer.state.values() for item in each.values()]
    held = [*map(part, stage.parameters()), *state, *buffers, data]
    storages = {each.untyped_storage().data_ptr(): each for each in held}
    return results, min(taken) + sum(s.untyped_storage().nbytes() for s in storages.values())


def part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def work(rank: int, *, solutions: Mapping[str, Sequence[Sequence[Solution]]]) -> None:
    names = ("pp", "dp")
    mesh = init_device_mesh("cpu", (N_STAGES, N_SHARDS), mesh_dim_names=names)
    index = mesh.get_local_rank("pp")
    for name, of_case in solutions.items():
        case, expected = CASES[name], None
        for share, solution in zip(case.shares, of_case[index], strict=True):
            stage = stage_of(index, case)
            exported = to_torch_checkpoint(stage, solution, on_excess="least")
            shard(stage, solution, mesh=mesh["dp"])
            got, measured_bytes = trained(stage, case, mesh)
            expected = got if expected is None else expected
            found = {
                "case": name,
                "rank": rank,
                "stage": index,
                "share": share,
                "n_in_flight": solution.graph.n_in_flight,
                "n_modules": len(exported.modules),
                "same": are_equal(expected, got),
                "measured_bytes": measured_bytes,
                "predicted_bytes": exported.peak_bytes,
            }
            os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


def main(cases: Sequence[str]) -> None:
    solutions = {case: [plans(CASES[case], index) for index in range(N_STAGES)] for case in cases}
    run(functools.partial(work, solutions=solutions), n_processes=N_STAGES * N_SHARDS)


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(CASES))
