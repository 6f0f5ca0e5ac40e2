"""Costs of operators, measured and by roofline, and the host's time to launch a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import measure_step, optimizer_of, step_of
from benchmarks.gpu.turns import MeasuredInTurn, exclusive_turn
from benchmarks.zoo import Subject
from graphs.costs import Cost, OpCall
from graphs.trace import trace


class _MeasuredAndRoofline(MeasuredInTurn):
    """Measured costs that record, for every call, the measured and the roofline's time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pairs: list[tuple[str, float, float]] = []

    def cost(self, call: OpCall) -> Cost:
        cost = super().cost(call)
        self.pairs.append((str(call.target), cost.time_s, self.roofline.cost(call).time_s))
        return cost


def compare_with_roofline(subject: Subject, device: torch.device) -> dict[str, Any]:
    """Measured and roofline times, summed over the step's operators, their ratio, the 12 slowest
    operators, and the time of a real step.

    The model is traced on the meta device, so that each operator is measured on an empty device.
    """
    with torch.device("meta"):
        model = subject.build().to(dtype=subject.dtype).train()
    batch = tuple(
        t.to(subject.dtype if t.is_floating_point() else None)
        for t in subject.batch(subject.batch_size)
    )
    cost_model = _MeasuredAndRoofline(device)
    trace(model, batch, device=device, costs=cost_model)
    description = cost_model.description
    by_operator: dict[str, dict[str, float]] = {}
    for name, measured_s, roofline_s in cost_model.pairs:
        sums = by_operator.setdefault(name, {"measured_s": 0.0, "roofline_s": 0.0})
        sums["measured_s"] += measured_s
        sums["roofline_s"] += roofline_s
    with exclusive_turn():
        real, real_batch = subject.model_and_batch(device)
        optimizer = optimizer_of(real)
        figures = measure_step(step_of(real, real_batch, optimizer), real, real_batch, optimizer)
    measured_s = sum(pair[1] for pair in cost_model.pairs)
    roofline_s = sum(pair[2] for pair in cost_model.pairs)
    slowest = sorted(by_operator.items(), key=lambda item: -item[1]["measured_s"])[:12]
    return {
        "status": "ran",
        "n_distinct": description["n_distinct"],
        "n_fallbacks": description["n_fallbacks"],
        "measured_s": measured_s,
        "roofline_s": roofline_s,
        "ratio": measured_s / roofline_s,
        "step_s": figures.time_s,
        "operators": dict(slowest),
    }


class _OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return func(*args, **(kwargs or {}))


def host_time(step: Callable[[], None], device: torch.device) -> tuple[int, float]:
    """Number of operators in a step, and the seconds that the host takes to launch all of them: the
    least of five runs."""
    with _OperatorCounter() as counter:
        step()
    times_s = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - started_s)
    return counter.n_calls, min(times_s)
