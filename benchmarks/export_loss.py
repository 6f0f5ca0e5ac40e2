"""What exporting a plan to `torch.utils.checkpoint` costs: overheads of plan and export.

    python -m benchmarks.export_loss --out benchmarks/results/export_loss.json
        [--models gpt2,bert-base] [--shares 0.7,0.5] [--fsdp N] [--time-limit S]

A plan schedules single operators; its export (`to_torch_checkpoint`) can only checkpoint modules.
Each model is planned for several budgets. A budget given as a share lies between the smallest
budget known to be feasible (0) and the peak of the step without checkpointing (1), as in
`benchmarks.plan_quality`. Plans are made on fake tensors with an H100's roofline, and without
rewrites, which checkpointed modules cannot run. Overheads are those of simulated schedules, in
percent of the step without checkpointing. With --fsdp, the step is that of one of N ranks of FSDP2
over NVLink.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row, percent
from benchmarks.zoo.graphs import capture_step
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import named
from graphs.trace import trace
from scheduler_runtime.export import ExportError, to_torch_checkpoint
from solver.methods import find_obstacle
from solver.schedule import Request, baseline, simulate
from solver.solving import attempt

Batch = Any
SHARES = (0.7, 0.5, 0.3)


def _example(name: str, **sizes: Any) -> tuple[nn.Module, Batch]:
    module = importlib.import_module(f"examples.{name}")
    return module.get_model(**sizes), module.get_batch()


def _bert(n_rows: int = 16, length: int = 512) -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    from graphs.training_step import LossOnly

    tokens = torch.zeros(n_rows, length, dtype=torch.int64)
    model = LossOnly(BertForMaskedLM(BertConfig(use_cache=False)))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def _t5(n_rows: int = 16, length: int = 512) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    from graphs.training_step import LossOnly

    config = T5Config(d_model=512, num_layers=6, use_cache=False, decoder_start_token_id=0)
    tokens = torch.zeros(n_rows, length, dtype=torch.int64)
    model = LossOnly(T5ForConditionalGeneration(config)).train()
    return model, {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": functools.partial(_example, "gpt2"),
    "gpt2-dropout": functools.partial(_example, "gpt2", dropout=0.1),
    "llama-4": functools.partial(_example, "llama", n_layers=4),
    "resnet50": functools.partial(_example, "resnet50"),
    "vit-base": functools.partial(_example, "vit"),
    "bert-base": _bert,
    "t5-small": _t5,
    "unet": functools.partial(_example, "unet"),
}
"""Models of the published sizes (Llama: 4 layers), with the examples' batches; BERT and T5 have
16 x 512 tokens."""


def main() -> None:
    parser = harness.parser("export_loss", __doc__, time_limit_s=60.0)
    parser.add_argument("--models", type=harness.names(MODELS), default=list(MODELS))
    parser.add_argument("--shares", type=harness.shares, default=SHARES)
    parser.add_argument("--fsdp", type=int, default=None, help="of one of N ranks of FSDP2")
    arguments = parser.parse_args()
    harness.run_each(
        arguments,
        "models",
        {
            name: functools.partial(
                rows_of,
                MODELS[name],
                arguments.shares,
                fsdp=arguments.fsdp,
                time_limit_s=arguments.time_limit,
            )
            for name in arguments.models
        },
        line=_line,
        faults=lambda _row: [],
        markdown=markdown,
        versions=["transformers"],
    )


def rows_of(
    make: Callable[[], tuple[nn.Module, Batch]],
    shares: Sequence[float],
    *,
    fsdp: int | None,
    time_limit_s: float,
) -> Iterator[Row]:
    """Plan and export one model: a row for each share of the budget."""
    with torch.device("meta"):
        model, batch = make()
        graph = (
            capture_step(model, batch).graph if fsdp is None else sharded_step(model, batch, fsdp)
        )
    least_bytes = find_obstacle(graph).reached_bytes
    for share in shares:
        yield row_of(model, graph, share, least_bytes=least_bytes, time_limit_s=time_limit_s)


def sharded_step(model: nn.Module, batch: Batch, n_ranks: int) -> Graph:
    """The step of one of `n_ranks` ranks of FSDP2."""
    return trace(model, batch, device="cpu", costs=Roofline(named("h100")), fsdp=n_ranks)


def row_of(
    model: nn.Module, graph: Graph, share: float, *, least_bytes: int, time_limit_s: float
) -> Row:
    """Plan for this share of the budget range, export the plan, and report both."""
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    budget_bytes = least_bytes + int(share * (peak_bytes - least_bytes))
    solution = attempt(graph, Request(budget_bytes, time_limit_s=time_limit_s))
    row: Row = {
        "share": share,
        "budget_bytes": budget_bytes,
        "planned_overhead": solution.overhead,
    }
    started_s = time.process_time()
    try:
        export = to_torch_checkpoint(model, solution)
    except ExportError as error:
        return row | {"error": str(error)}
    export.remove()
    return row | {
        "exported_overhead": export.overhead,
        "peak_bytes": export.peak_bytes,
        "n_checkpoints": len(export.modules),
        "search_s": time.process_time() - started_s,
        "lost": list(export.lost),
    }


def _line(row: Row) -> str:
    return str({key: value for key, value in row.items() if key != "lost"})


def markdown(report: Row) -> str:
    rows = []
    for name, each in report["models"].items():
        for row in each:
            planned, exported = row["planned_overhead"], row.get("exported_overhead")
            lost = None if exported is None else exported - planned
            rows.append(
                (
                    name,
                    f"{row['share']:.0%}",
                    percent(planned),
                    "nothing fits" if exported is None else percent(exported),
                    "" if lost is None else percent(lost),
                    row.get("n_checkpoints", ""),
                    f"{row['search_s']:.0f}" if "search_s" in row else "",
                )
            )
    head = ("model", "budget", "plan %", "export %", "lost", "checkpoints", "search s")
    legend = (
        "Overhead of the plan of single operators (without rewrites) and of its export, in percent "
        "of the plain step, and the difference in points. The budget lies between the least "
        "feasible one (0 %) and the peak of the plain step (100 %). Seconds: processor time of the "
        "export."
    )
    title = "# What exporting to torch.utils.checkpoint loses"
    return "\n\n".join([title, harness.ran(report), legend, harness.table(head, rows)]) + "\n"


if __name__ == "__main__":
    main()
