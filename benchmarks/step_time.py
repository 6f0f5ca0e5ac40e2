"""Measure the overhead of plans on this CPU and compare it with the forecasts.

    python -m benchmarks.step_time --out benchmarks/results/step_time.json
        [--models moe,convnext,unet] [--share 0.5] [--rounds N] [--keep-blocks]

Copies of a model run a step (forward and backward pass) in turns, in one process: one without a
plan, one with a plan that recomputes nothing, one planned by the rates of a generic CPU, one by
measured times of operators (these three without rewrites), and one with rewrites, the default. Each
figure is the median over all rounds of the ratio to the step without a plan in the same round. It
is processor time on one thread, so that other load matters little. A budget given as a share lies
between the resident bytes (0) and the peak without a plan (1).

--keep-blocks makes glibc keep freed memory in the process. By default it returns large blocks to
the system, which must map fresh pages at the next use.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row, percent
from examples import unet
from graphs.training_step import LossOnly
from scheduler_runtime import apply
from solver import solve
from solver.schedule import Solution, baseline, simulate

KEPT_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
N_WARM_UP = 3
"""Rounds that do not count: the first step with a plan makes its program."""
NO_RECOMPUTATION, BY_RATES, BY_TIMES = "recomputes nothing", "by rates", "by measured times"
REWRITTEN = "by rates, with rewrites"


def _moe() -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    tokens = torch.randint(0, 1000, (4, 128))
    return LossOnly(MixtralForCausalLM(config)), {"input_ids": tokens, "labels": tokens}


def _convnext() -> tuple[nn.Module, Any]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[32, 64, 96, 128], depths=[2, 2, 3, 2], num_labels=10)
    batch = {"pixel_values": torch.randn(16, 3, 96, 96), "labels": torch.randint(0, 10, (16,))}
    return LossOnly(ConvNextForImageClassification(config)), batch


def _unet() -> tuple[nn.Module, Any]:
    return unet.get_model(width=8, n_levels=3), unet.get_batch(batch_size=4, image_size=64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "moe": _moe,
    "convnext": _convnext,
    "unet": _unet,
}


def main() -> None:
    parser = harness.parser("step_time", __doc__, time_limit_s=20.0)
    parser.add_argument("--models", type=harness.names(MODELS), default=list(MODELS))
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--keep-blocks", action="store_true")
    arguments = parser.parse_args()
    if arguments.keep_blocks and not KEPT_BLOCKS.items() <= os.environ.items():
        program = [sys.executable, "-m", "benchmarks.step_time", *sys.argv[1:]]
        os.execve(sys.executable, program, {**os.environ, **KEPT_BLOCKS})
    torch.set_num_threads(1)
    harness.run_each(
        arguments,
        "models",
        {name: functools.partial(_rows, name, arguments) for name in arguments.models},
        line=_line,
        faults=lambda _row: [],
        markdown=_markdown,
        versions=("transformers",),
    )


def _rows(name: str, arguments: Any) -> Iterator[Row]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    free = solve(model, batch, budget="100GB", rewrites="none")
    resident = free.graph.resident_bytes
    budget = int(resident + arguments.share * (free.baseline.peak_bytes - resident))
    plan_options = {"budget": budget, "rewrites": "none", "time_limit_s": arguments.time_limit}
    solutions = {
        NO_RECOMPUTATION: free,
        BY_RATES: solve(model, batch, **plan_options),
        BY_TIMES: solve(model, batch, costs="measured", **plan_options),
        REWRITTEN: solve(model, batch, **{**plan_options, "rewrites": "bitwise"}),
    }
    models: dict[str, nn.Module] = {"": copy.deepcopy(model)}
    for title, solution in solutions.items():
        models[title] = copy.deepcopy(model)
        apply(models[title], solution)
    seconds_by_plan = measure_rounds(models, batch, arguments.rounds)
    for title, solution in solutions.items():
        ratios = [
            s / plain - 1
            for s, plain in zip(seconds_by_plan[title], seconds_by_plan[""], strict=True)
        ]
        is_rewritten = title == REWRITTEN  # another graph, for which operators were not measured
        low, middle, high = statistics.quantiles(ratios, n=4)
        yield {
            "model": name,
            "plan": title,
            "n_nodes": len(solution.graph.nodes),
            "n_recomputed": solution.simulation.n_recomputed if solution.simulation else None,
            "plain_step_s": statistics.median(seconds_by_plan[""]),
            "forecast_by_rates": solution.overhead
            if is_rewritten
            else _forecast(solutions[BY_RATES], solution),
            "forecast_by_times": None if is_rewritten else _forecast(solutions[BY_TIMES], solution),
            "measured": middle,
            "quartiles": [low, high],
        }


def _forecast(costed: Solution, planned: Solution) -> float:
    """The overhead of the plan `planned`, by the operator times in the graph of `costed`."""
    assert planned.schedule is not None
    plain_s = simulate(costed.graph, baseline(costed.graph)).time_s
    return simulate(costed.graph, planned.schedule).time_s / plain_s - 1


def measure_rounds(
    models: dict[str, nn.Module], batch: Any, n_rounds: int
) -> dict[str, list[float]]:
    """Processor seconds of each model's step in each round.

    models: name of the plan -> model; the models take turns.
    """
    seconds_by_plan: dict[str, list[float]] = {title: [] for title in models}
    gc.disable()
    try:
        for _ in range(N_WARM_UP + n_rounds):
            for title, model in models.items():
                model.zero_grad()
                started_s = time.process_time()
                loss = model(**batch) if isinstance(batch, dict) else model(*batch)
                loss.backward()
                seconds_by_plan[title].append(time.process_time() - started_s)
            gc.collect()
    finally:
        gc.enable()
    return {title: times_s[N_WARM_UP:] for title, times_s in seconds_by_plan.items()}


def _line(row: Row) -> str:
    return (
        f"{row['model']} ({row['plan']}): forecast {percent(row['forecast_by_rates'])} by rates, "
        f"{percent(row['forecast_by_times'])} by measured times, measured "
        f"{percent(row['measured'])}"
    )


def _markdown(report: Row) -> str:
    head = ["model", "step", "plan", "recomputed", "forecast by rates", "by measured times"]
    cells = (
        [
            row["model"],
            f"{1000 * row['plain_step_s']:.0f} ms",
            row["plan"],
            str(row["n_recomputed"]),
            percent(row["forecast_by_rates"]),
            percent(row["forecast_by_times"]),
            percent(row["measured"]),
            " to ".join(percent(each) for each in row["quartiles"]),
        ]
        for rows in report["models"].values()
        for row in rows
    )
    return harness.table([*head, "measured", "middle half"], cells)


if __name__ == "__main__":
    main()
