"""Four stages of a Llama under 1F1B within one budget: a plan for each stage, and one for all.

    python -m benchmarks.pipeline --out benchmarks/results/pipeline.json [--time-limit S]

16 layers of Llama 3 8B's shape on four ranks, bf16, one sequence of 4096 tokens in a micro-batch,
AdamW, H100 roofline, without rewrites. Seconds are those of the forward and backward pass of one
micro-batch: the slowest stage sets the pace of the pipeline. Compared are

- every block: stock checkpointing of each layer in all stages;
- uniform: each stage is planned as though it had as many micro-batches in flight as the first;
- per stage: each is planned for those that it has;
- per stage, split: the layers are divided so that the slowest stage is fastest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.published.llama import BF16, LlamaLayer, Norm, linear
from graphs import Graph, Pipeline
from solver import Solution, solve

WIDTH, N_HEADS, N_KV, MLP_WIDTH, N_TOKENS, LENGTH = 4096, 32, 8, 14336, 128256, 4096
N_STAGES, N_MICROBATCHES, N_LAYERS, BUDGET = 4, 8, 16, "20GB"
LAYERS_TRIED = (3, 4, 5)


class LlamaStage(nn.Module):
    """Some layers of a Llama; with the embedding in the first stage, and the head in the last."""

    def __init__(self, n_layers: int, pipeline: Pipeline) -> None:
        super().__init__()
        self.embedding = self.head = None
        if pipeline.is_first:
            self.embedding = nn.Embedding(N_TOKENS, WIDTH, dtype=BF16, device="meta")
        self.layers = nn.ModuleList(
            LlamaLayer(WIDTH, N_HEADS, N_KV, MLP_WIDTH) for _ in range(n_layers)
        )
        if pipeline.is_last:
            self.head = nn.Sequential(Norm(WIDTH), linear(WIDTH, N_TOKENS, bias=False))
        for name in ("cosine", "sine"):
            rotations = torch.empty(1, LENGTH, WIDTH // N_HEADS, dtype=BF16, device="meta")
            self.register_buffer(name, rotations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x if self.head is None else self.head(x)


def planned(problem: Any, *, method: str = "auto", time_limit_s: float) -> Solution:
    """problem: a Graph, or a stage's layers and place."""
    options: dict[str, Any] = {"budget": BUDGET, "method": method, "time_limit_s": time_limit_s}
    if isinstance(problem, Graph):
        return solve(problem, reserve="750MB", **options)
    n_layers, pipeline = problem
    batch: Any = torch.empty(1, LENGTH, WIDTH, dtype=BF16, device="meta", requires_grad=True)
    if pipeline.is_first:
        batch = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    if pipeline.is_last:
        batch = (batch, torch.zeros(1, LENGTH, dtype=torch.long, device="meta"))
        options |= {"inputs": lambda pair: pair[0], "loss": loss_of}
    return solve(
        LlamaStage(n_layers, pipeline),
        batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        pipeline=pipeline,
        device="h100",
        rewrites="none",
        **options,
    )


def loss_of(logits: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), pair[1].flatten())


def figures(solution: Solution) -> Row:
    """Seconds are of one micro-batch, without the optimizer's step."""
    graph, found = solution.graph, solution.simulation
    steps_s = math.fsum(node.time_s for node in graph.nodes if node.phase == "optimizer")
    return {
        "n_in_flight": graph.n_in_flight,
        "plain_s": graph.baseline_time_s - steps_s,
        "plain_peak_bytes": solution.baseline.peak_bytes,
        "micro_batch_s": None if found is None else found.time_s - steps_s,
        "bound_s": solution.lower_bound_s - steps_s,
        "peak_bytes": None if found is None else found.peak_bytes,
        "saved_bytes": None if found is None else found.saved_bytes,
        "status": solution.status,
        "timed_out": solution.timed_out,
    }


def best_split(seconds: Mapping[tuple[int, int], float | None]) -> tuple[int, ...]:
    """Layers by stage, so that the slowest takes least; of these the least in all.

    seconds: by stage and its number of layers (None: nothing fits).
    """

    def cost(split: tuple[int, ...]) -> tuple[float, float]:
        found = [seconds[i, n] for i, n in enumerate(split)]
        times = [math.inf if each is None else each for each in found]
        return max(times), sum(times)

    splits = itertools.product(LAYERS_TRIED, repeat=N_STAGES)
    return min((each for each in splits if sum(each) == N_LAYERS), key=cost)


def measured(time_limit_s: float) -> Iterator[tuple[str, Row]]:
    """The rows: "per stage 0 x 4", "uniform 0 x 4", "every block 0 x 4"."""
    even = N_LAYERS // N_STAGES
    for stage, n_layers in itertools.product(range(N_STAGES), LAYERS_TRIED):
        pipeline = Pipeline(stage, N_STAGES, N_MICROBATCHES)
        solution = planned((n_layers, pipeline), time_limit_s=time_limit_s)
        yield f"per stage {stage} x {n_layers}", figures(solution)
        if n_layers == even:
            stock = planned(solution.graph, method="every_block", time_limit_s=time_limit_s)
            yield f"every block {stage} x {n_layers}", figures(stock)
            first = dataclasses.replace(solution.graph, n_in_flight=N_STAGES)
            uniform = planned(first, time_limit_s=time_limit_s)
            yield f"uniform {stage} x {n_layers}", figures(uniform)


def main() -> None:
    arguments = harness.parser("pipeline", __doc__, time_limit_s=60.0).parse_args()
    report = harness.read(arguments.out, "rows")
    report["circumstances"] = harness.circumstances(arguments.time_limit)
    for name, row in measured(arguments.time_limit):
        report["rows"][name] = row
        print(name, row, flush=True)
        harness.write(arguments.out, report)
    harness.write(arguments.out, report, markdown)
    print(markdown(report))


def markdown(report: Row) -> str:
    text = (
        f"{harness.ran(report)}\n\n16 layers of Llama 3 8B's shape in four stages under 1F1B, "
        f"{N_MICROBATCHES} micro-batches, AdamW, {BUDGET} on each rank (750 MB reserve), H100 "
        "roofline, without rewrites. Milliseconds of forward and backward pass of one micro-batch; "
        "the slowest stage sets the pace. What the rows are is said in `benchmarks/pipeline.py`.\n"
    )
    return "\n".join(
        [
            "# Pipelines\n",
            text,
            _ways(report["rows"]),
            "\nThe even split, stage by stage:\n",
            _stages(report["rows"]),
            "",
        ]
    )


def _ways(rows: Mapping[str, Row]) -> str:
    """Each way to plan, with the milliseconds of its stages."""
    even = (N_LAYERS // N_STAGES,) * N_STAGES
    seconds = {
        (i, n): rows[f"per stage {i} x {n}"]["micro_batch_s"]
        for i, n in itertools.product(range(N_STAGES), LAYERS_TRIED)
    }
    ways = [(way, way, even) for way in ("every block", "uniform", "per stage")]
    ways.append(("per stage, split", "per stage", best_split(seconds)))
    lines = []
    for title, way, split in ways:
        times = [rows[f"{way} {i} x {n}"]["micro_batch_s"] for i, n in enumerate(split)]
        slowest = None if None in times else max(times)
        lines.append([title, "+".join(map(str, split)), *map(_ms, times), _ms(slowest)])
    heads = [f"stage {i}" for i in range(N_STAGES)]
    return harness.table(["plans", "layers", *heads, "slowest"], lines)


def _stages(rows: Mapping[str, Row]) -> str:
    """The plans per stage of the even split."""
    even = N_LAYERS // N_STAGES
    heads = ("stage", "in flight", "plain peak", "plain ms", "saved", "overhead, %", "bound, %")
    lines = []
    for i in range(N_STAGES):
        row = rows[f"per stage {i} x {even}"]
        sizes = _gb(row["plain_peak_bytes"]), _ms(row["plain_s"]), _gb(row["saved_bytes"])
        shares = _share(row, "micro_batch_s"), _share(row, "bound_s")
        lines.append([i, row["n_in_flight"], *sizes, *shares])
    return harness.table(heads, lines)


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:.2f}"


def _gb(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else f"{size_bytes / 1e9:.2f} GB"


def _share(row: Row, field: str) -> str:
    if row["micro_batch_s"] is None:
        return "none"
    return harness.percent(max(0.0, row[field] / row["plain_s"] - 1.0))


if __name__ == "__main__":
    main()
