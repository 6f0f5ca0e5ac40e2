"""Plan the four stages of a Llama pipeline (1F1B) for one budget, each by itself or all alike.

    python -m benchmarks.pipeline --out benchmarks/results/pipeline.json [--time-limit S]

16 layers of Llama 3 8B's shape on four ranks: bf16, micro-batches of one sequence of 4096 tokens,
AdamW, an H100's roofline, without rewrites. Times are those of the forward and backward pass of one
micro-batch; the slowest stage sets the pace of the pipeline. Compared are

- every block: stock checkpointing of each layer in all stages;
- uniform: each stage is planned as if it had as many micro-batches in flight as the first stage;
- per stage: each stage is planned for the micro-batches that it has in flight;
- per stage, split: as before, with the layers divided so that the slowest stage is as fast as
  possible (`split_pipeline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.published.llama import BF16, LlamaLayer, Norm, linear
from solver import PipelineSplit, Solution, solve, split_pipeline
from solver.plan_analysis import micro_batch_s

WIDTH, N_HEADS, N_KV, MLP_WIDTH, N_TOKENS, LENGTH = 4096, 32, 8, 14336, 128256, 4096
N_STAGES, N_MICROBATCHES, N_LAYERS = 4, 8, 16
BUDGETS = ("20GB", "26GB")


class Layer(nn.Module):
    """A layer of a Llama; the first includes the embedding, the last the head."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = self.head = None
        if is_first:
            self.embedding = nn.Embedding(N_TOKENS, WIDTH, dtype=BF16, device="meta")
        self.layer = LlamaLayer(WIDTH, N_HEADS, N_KV, MLP_WIDTH)
        if is_last:
            self.head = nn.Sequential(Norm(WIDTH), linear(WIDTH, N_TOKENS, bias=False))

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.layer(x, cosine, sine)
        return x if self.head is None else self.head(x)


class LlamaStage(nn.Module):
    """Some layers of a Llama, with the cosines and sines that they share."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for name in ("cosine", "sine"):
            rotations = torch.empty(1, LENGTH, WIDTH // N_HEADS, dtype=BF16, device="meta")
            self.register_buffer(name, rotations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x


def split(budget: str, time_limit_s: float) -> PipelineSplit:
    tokens = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    return split_pipeline(
        [Layer(is_first=i == 0, is_last=i == N_LAYERS - 1) for i in range(N_LAYERS)],
        tokens,
        target=tokens,
        loss=loss_of,
        stage_of=LlamaStage,
        n_stages=N_STAGES,
        n_microbatches=N_MICROBATCHES,
        budget=budget,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        device="h100",
        rewrites="none",
        time_limit_s=time_limit_s,
    )


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def stage_figures(solution: Solution) -> Row:
    """A row for a stage's plan. Times are of one micro-batch, without the optimizer's step."""
    graph, found = solution.graph, solution.simulation
    steps_s = sum(node.time_s for node in graph.nodes if node.phase == "optimizer")
    return {
        "n_in_flight": graph.n_in_flight,
        "plain_s": graph.baseline_time_s - steps_s,
        "plain_peak_bytes": solution.baseline.peak_bytes,
        "micro_batch_s": micro_batch_s(solution),
        "bound_s": solution.lower_bound_s - steps_s,
        "peak_bytes": None if found is None else found.peak_bytes,
        "saved_bytes": None if found is None else found.saved_bytes,
        "status": solution.status,
        "timed_out": solution.timed_out,
    }


def measured_rows(budget: str, time_limit_s: float) -> Iterator[tuple[str, Row]]:
    """Yield names and rows: "split" for the division of the layers, and for each stage, such as
    stage 0, "split 0", "per stage 0", "every block 0" and "uniform 0"."""
    found = split(budget, time_limit_s)
    yield (
        "split",
        {
            "sizes": list(found.sizes),
            "slowest_s": found.slowest_s,
            "bound_s": found.lower_bound_s,
            "n_divisions": found.n_divisions,
            "n_plans": found.n_plans,
        },
    )
    for stage, solution in enumerate(found.solutions):
        yield f"split {stage}", stage_figures(solution)
    for stage, solution in enumerate(found.equal):
        yield f"per stage {stage}", stage_figures(solution)
        options: dict[str, Any] = {"budget": budget, "reserve": "750MB"}
        options["time_limit_s"] = time_limit_s
        yield (
            f"every block {stage}",
            stage_figures(solve(solution.graph, method="every_block", **options)),
        )
        first = dataclasses.replace(solution.graph, n_in_flight=N_STAGES)
        yield f"uniform {stage}", stage_figures(solve(first, **options))


def main() -> None:
    arguments = harness.parser("pipeline", __doc__, time_limit_s=60.0).parse_args()
    report: Row = {"rows": {}}
    report["circumstances"] = harness.circumstances(arguments.time_limit)
    for budget in BUDGETS:
        rows = report["rows"][budget] = {}
        for name, row in measured_rows(budget, arguments.time_limit):
            rows[name] = row
            print(budget, name, row, flush=True)
            harness.write(arguments.out, report)
    harness.write(arguments.out, report, markdown)
    print(markdown(report))


def markdown(report: Row) -> str:
    text = (
        f"{harness.ran(report)}\n\n16 layers of Llama 3 8B's shape in four stages under 1F1B, "
        f"{N_MICROBATCHES} micro-batches, AdamW, 750 MB reserve on each rank, H100 roofline, "
        "without rewrites. Milliseconds of forward and backward pass of one micro-batch; "
        "the slowest stage sets the pace. What the rows are is said in `benchmarks/pipeline.py`.\n"
    )
    return "\n".join(
        [
            "# Pipelines\n",
            text,
            *(
                line
                for budget, rows in report["rows"].items()
                for line in _budget_section(budget, rows)
            ),
            "",
        ]
    )


def _budget_section(budget: str, rows: Mapping[str, Row]) -> Iterator[str]:
    yield f"## {budget} on each rank\n"
    yield _ways_table(rows)
    yield _bound_sentence(rows["split"])
    for title, way in (("The even split, stage by stage", "per stage"), ("The best one", "split")):
        yield f"\n{title}:\n"
        yield _stages_table(rows, way)
    yield ""


def _bound_sentence(row: Row) -> str:
    return (
        f"\nNo division has a slowest stage faster than {_ms(row['bound_s'])} ms. Of "
        f"{row['n_divisions']} divisions, {row['n_plans']} stages were planned to know it, those "
        "of the even split among them."
    )


def _ways_table(rows: Mapping[str, Row]) -> str:
    """A table of the ways to plan, with the milliseconds of each stage."""
    even = [N_LAYERS // N_STAGES] * N_STAGES
    ways = [(way, way, even) for way in ("every block", "uniform", "per stage")]
    ways.append(("per stage, split", "split", rows["split"]["sizes"]))
    lines = []
    for title, way, sizes in ways:
        times = [rows[f"{way} {i}"]["micro_batch_s"] for i in range(N_STAGES)]
        slowest = None if None in times else max(times)
        lines.append([title, "+".join(map(str, sizes)), *map(_ms, times), _ms(slowest)])
    heads = [f"stage {i}" for i in range(N_STAGES)]
    return harness.table(["plans", "layers", *heads, "slowest"], lines)


def _stages_table(rows: Mapping[str, Row], way: str) -> str:
    """A table of the stages of one division of the layers, with their plans."""
    heads = ("stage", "in flight", "plain peak", "plain ms", "saved", "overhead, %", "bound, %")
    lines = []
    for i in range(N_STAGES):
        row = rows[f"{way} {i}"]
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
