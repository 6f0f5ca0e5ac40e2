"""The peak and the time of a published row, by this project's tracing, costs and simulator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.published.errors import NotPredictedError
from benchmarks.published.models import model_step
from benchmarks.published.rows import TIME, level_of, module_row
from benchmarks.published.scripts import Script
from benchmarks.published.shares import expected_share, ratio_range
from graphs.capture import can_trace_absent, for_absent_card
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import Hardware, card_called
from graphs.model_calls import Call
from graphs.trace import loss_index, rehearsed, trace_module
from graphs.training_step import cublas_workspace_bytes, with_resident, with_unknown_loss
from solver.plan_analysis import split_s
from solver.schedule import simulate_unplanned

MIB = 2**20


@dataclass(frozen=True)
class Prediction:
    """value, measured: in the row's unit. is_up_to_a_constant: earlier calls in the process have
    left bytes on the card that the row does not tell; value is without them. rate_share: of the
    card's peak rates, what the measured speed is. ratio: see `shares.ratio_range`. kinds: times of
    products and of other operators at peak rates."""

    value: float
    measured: float
    is_up_to_a_constant: bool = False
    rate_share: float | None = None
    ratio: tuple[float, float] | None = None
    kinds: tuple[float, float] | None = None


def predicted(row: Mapping[str, Any]) -> Prediction:
    """Raises NotPredictedError."""
    if level_of(row) == "model":
        value, measured, rate_share, ratio = model_step(row)
        return Prediction(value, measured, rate_share=rate_share, ratio=ratio)
    checked = module_row(row)
    hardware = card_called(checked.gpu, capacity_bytes=_capacity_bytes(checked.gpu))
    if hardware is None:
        raise NotPredictedError(f"no figures of {checked.gpu} are known")
    script, measured = checked.script, checked.measured
    graph = graph_of(script, hardware)
    if checked.metric == TIME:
        at_peak_rates = time_ms(graph, script, hardware)
        value = at_peak_rates / expected_share(hardware.name)
        products_ms = 1e3 * split_s(graph.nodes)[0]
        kinds = products_ms, at_peak_rates - products_ms
        share, ratio = at_peak_rates / measured, ratio_range(*kinds, measured)
        return Prediction(value, measured, rate_share=share, ratio=ratio, kinds=kinds)
    return Prediction(simulate_unplanned(graph).peak_bytes / MIB, measured, script.compiles)


def _capacity_bytes(gpu: str) -> int:
    """Of a name such as "NVIDIA A100-SXM4-80GB"; 80 GB where it does not say."""
    found = re.search(r"([0-9]+) ?GB", gpu)
    return int(found.group(1) if found else 80) * 10**9


def graph_of(script: Script, hardware: Hardware) -> Graph:
    """The graph of one call, on fake tensors, with what is held besides."""
    device = torch.device("cuda" if can_trace_absent() else "cpu")
    call = Call.of(script.batch, {})
    with for_absent_card(device, hardware.compute_capability, model=script.module):
        step = trace_module(
            script.module,
            call,
            device=device,
            choose=loss_index if script.gradient == "none" else _every_output,
            gradients="accumulate" if script.accumulates else "fresh",
            costs=Roofline(hardware),
        )
        graph = rehearsed(script.module, call, step, device=device).graph
    if script.gradient == "made":
        graph = with_unknown_loss(graph, reserved_bytes=0)
        # backward(gradient) holds the gradients of the outputs while it runs
        graph = _held(graph, {t.name for t in graph.tensors if t.kind == "tangent"})
    if script.retains_graph:
        graph = _held(graph, _saved(graph))
    beside = sum(each.nbytes for each in script.beside)
    if script.has_multiplied and "cublas_workspaces" not in graph.tensor_by_name:
        beside += cublas_workspace_bytes(hardware)
    return with_resident(graph, "beside", beside)


def time_ms(graph: Graph, script: Script, hardware: Hardware) -> float:
    """Of the operators by the card's peak rates, and of what the script runs besides: gradients are
    added to those of earlier calls, and the gradient of the output is drawn at random."""
    inputs = ("x", "residual") if script.drops_x_gradient else ()
    layout = graph.meta.parameter_layout
    dropped = {layout[name]["gradient"] for name in inputs if name in layout}
    moved_bytes = 0
    before_s = 0.0
    for node in graph.nodes:
        sizes = [graph.tensor_by_name[name].size_bytes for name in (*node.inputs, *node.outputs)]
        if node.name.startswith("accumulate_") and dropped.isdisjoint(node.inputs):
            moved_bytes += sum(sizes) + sizes[0]  # it writes the sum
        if node.phase == "outside":
            moved_bytes += sum(graph.tensor_by_name[name].size_bytes for name in node.outputs)
        if node.phase == "forward" and node.op.rpartition(".")[0] in script.made_before:
            before_s += node.time_s
    return 1e3 * (graph.baseline_time_s - before_s + moved_bytes / hardware.bytes_per_s)


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
