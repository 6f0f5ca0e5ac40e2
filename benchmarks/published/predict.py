"""The peak and the time of a published row, by this project's tracing, costs and simulator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.published.eager import dropped_after, held_by_variables, in_place
from benchmarks.published.errors import NotPredictedError
from benchmarks.published.models import model_step
from benchmarks.published.scripts import SCRIPTS, Script
from benchmarks.published.shares import fitted_share, ratio_range
from graphs.capture import can_trace_absent, for_absent_card
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import Hardware, card_called
from graphs.model_calls import Call
from graphs.trace import loss_index, trace_module
from graphs.training_step import cublas_workspace_bytes, with_resident, with_unknown_loss
from solver.module_checkpointing import plan_regions
from solver.plan_analysis import split_s
from solver.schedule import Schedule, simulate

MIB = 2**20
PEAK, TIME = "max_memory_allocated MiB", "median ms fwd+bwd"
PYTORCHS_OWN = ("huggingface", "torch")
"""Providers that run PyTorch's operators one by one."""


@dataclass(frozen=True)
class Prediction:
    """value, measured: in the row's unit. is_up_to_a_constant: earlier calls in the process have
    left bytes on the card that the row does not tell; value is without them. rate_share: of the
    card's peak rates, what the measured speed is. ratio: see `shares.ratio_range`."""

    value: float
    measured: float
    is_up_to_a_constant: bool = False
    rate_share: float | None = None
    ratio: tuple[float, float] | None = None


def predicted(row: Mapping[str, Any]) -> Prediction:
    """Raises NotPredictedError."""
    if row["level"] == "model":
        value, measured, rate_share, ratio = model_step(row)
        return Prediction(value, measured, rate_share=rate_share, ratio=ratio)
    if row["provider"] not in PYTORCHS_OWN:
        raise NotPredictedError(
            f"provider {row['provider']}: its own kernels, whose memory no traced operator shows"
        )
    if row["op"] not in SCRIPTS:
        raise NotPredictedError(f"what the script of {row['op']} builds is not described here")
    hardware = card_called(row["gpu"], capacity_bytes=_capacity_bytes(row["gpu"]))
    if hardware is None:
        raise NotPredictedError(f"no figures of {row['gpu']} are known")
    if row["metric"] not in (PEAK, TIME):
        raise NotPredictedError(f"metric {row['metric']!r}; known are {PEAK!r} and {TIME!r}")
    script = _script(row)
    graph = graph_of(script, hardware)
    if row["metric"] == TIME:
        at_peak_rates = time_ms(graph, hardware)
        value = at_peak_rates / (fitted_share(hardware.name) or 1.0)
        products_ms = 1e3 * split_s(graph.nodes)[0]
        ratio = ratio_range(products_ms, at_peak_rates - products_ms, row["value"])
        share = at_peak_rates / row["value"]
        return Prediction(value, row["value"], rate_share=share, ratio=ratio)
    return Prediction(peak_mib(script, graph), row["value"], script.compiles)


def _script(row: Mapping[str, Any]) -> Script:
    try:
        x = {name: int(value) for name, value in row["x"].items()}
        return SCRIPTS[row["op"]]({"date": row["date"], **row["config"], **x})
    except (KeyError, ValueError, TypeError) as error:
        raise NotPredictedError(
            f"its config is not one of the releases described here ({error!r})"
        ) from error


def _capacity_bytes(gpu: str) -> int:
    """Of a name such as "NVIDIA A100-SXM4-80GB"; 80 GB where it does not say."""
    found = re.search(r"([0-9]+) ?GB", gpu)
    return int(found.group(1) if found else 80) * 10**9


def graph_of(script: Script, hardware: Hardware) -> Graph:
    """The graph of one call, on fake tensors, with what is held besides."""
    device = torch.device("cuda" if can_trace_absent() else "cpu")
    with for_absent_card(device, hardware.compute_capability):
        graph = trace_module(
            script.module,
            Call.of(script.batch, {}),
            device=device,
            choose=loss_index if script.gradient == "none" else _every_output,
            gradients="accumulate" if script.accumulates else "fresh",
            costs=Roofline(hardware),
        ).graph
    if script.gradient == "made":
        graph = with_unknown_loss(graph, reserved_bytes=0)
        # backward(gradient) holds the gradients of the outputs while it runs
        graph = _held(graph, {t.name for t in graph.tensors if t.kind == "tangent"})
    if script.retains_graph:
        graph = _held(graph, _saved(graph))
    graph = in_place(graph)
    beside = sum(each.nbytes for each in script.beside)
    if script.has_multiplied and "cublas_workspaces" not in graph.tensor_by_name:
        beside += cublas_workspace_bytes(hardware)
    return with_resident(graph, "beside", beside)


def schedule_of(script: Script, graph: Graph) -> Schedule:
    """The call as eager mode runs it: variables hold tensors until they are dropped, and a backward
    function holds what it has read until it returns."""
    schedule = plan_regions(graph, ()).schedule
    until = dropped_after(script.module, script.batch, graph)
    return held_by_variables(schedule, graph, until)


def peak_mib(script: Script, graph: Graph) -> float:
    """In MiB, as simulated."""
    return simulate(graph, schedule_of(script, graph)).peak_bytes / MIB


def time_ms(graph: Graph, hardware: Hardware) -> float:
    """Of the operators by the card's peak rates, and of what the script runs besides: gradients of
    weights are added to those of earlier calls (that of x is dropped before), and the gradient of
    the output is drawn at random."""
    x_gradient = graph.meta.parameter_layout.get("x", {}).get("gradient")
    moved_bytes = 0
    for node in graph.nodes:
        sizes = [graph.tensor_by_name[name].size_bytes for name in (*node.inputs, *node.outputs)]
        if node.name.startswith("accumulate_") and x_gradient not in node.inputs:
            moved_bytes += sum(sizes) + sizes[0]  # it writes the sum
        if node.phase == "outside":
            moved_bytes += sum(graph.tensor_by_name[name].size_bytes for name in node.outputs)
    return 1e3 * (graph.baseline_time_s + moved_bytes / hardware.bytes_per_s)


def _every_output(output: Any) -> tuple[int, ...]:
    return tuple(range(len(output))) if isinstance(output, tuple) else (0,)


def _saved(graph: Graph) -> set[str]:
    """What forward has made and backward reads."""
    made = {name for node in graph.forward_nodes for name in node.outputs}
    return made & {name for node in graph.later_nodes for name in node.inputs}


def _held(graph: Graph, names: set[str]) -> Graph:
    """The same, where these are on the device to the end of the step, as its outputs are."""
    added = tuple(sorted(names.difference(graph.outputs)))
    return dataclasses.replace(graph, outputs=(*graph.outputs, *added))
