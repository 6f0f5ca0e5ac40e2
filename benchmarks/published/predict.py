"""Predict the peak or the time of a published row by our own tracing, costs and simulator."""

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
    """A prediction and the published measurement.

    value, measured: in the row's unit.
    is_up_to_a_constant: earlier calls in the process have left bytes on the card that the row does
        not state; `value` does not include them.
    rate_share: the share of the card's peak rates at which the measured step ran (None: no time).
    ratio: see `shares.ratio_range`.
    kinds: milliseconds of matrix products and of other operators at peak rates (None: not known).
    """

    value: float
    measured: float
    is_up_to_a_constant: bool = False
    rate_share: float | None = None
    ratio: tuple[float, float] | None = None
    kinds: tuple[float, float] | None = None


def predict_row(row: Mapping[str, Any]) -> Prediction:
    """Predict the peak or the time of a row. Raises NotPredictedError if that is not possible."""
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
    return Prediction(
        simulate_unplanned(graph).peak_bytes / MIB, measured, script.has_compiled_before
    )


def _capacity_bytes(gpu: str) -> int:
    """Memory of the card by its name, such as "NVIDIA A100-SXM4-80GB"; 80 GB if not in the name."""
    found = re.search(r"([0-9]+) ?GB", gpu)
    return int(found.group(1) if found else 80) * 10**9


def graph_of(script: Script, hardware: Hardware) -> Graph:
    """The graph of the script's measured call, traced on fake tensors, with everything that the
    script holds besides as resident memory."""
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
        # backward(gradient) keeps the gradients of the outputs alive while it runs
        graph = _live_to_the_end(graph, {t.name for t in graph.tensors if t.kind == "tangent"})
    if script.retains_graph:
        graph = _live_to_the_end(graph, _saved_for_backward(graph))
    unused_bytes = sum(each.nbytes for each in script.unused_tensors)
    if script.has_cublas_workspace and "cublas_workspaces" not in graph.tensor_by_name:
        unused_bytes += cublas_workspace_bytes(hardware)
    return with_resident(graph, "beside", unused_bytes)


def time_ms(graph: Graph, script: Script, hardware: Hardware) -> float:
    """Milliseconds of the script's measured call at the card's peak rates.

    Beside the operators, these count the bytes moved where the script adds gradients to those of
    earlier calls and draws the output's gradient at random. Operators that ran before the measured
    call (`ops_run_before`) do not count.
    """
    inputs = ("x", "residual") if script.drops_x_gradient else ()
    layout = graph.meta.parameter_layout
    dropped = {layout[name]["gradient"] for name in inputs if name in layout}
    moved_bytes = 0
    before_s = 0.0
    for node in graph.nodes:
        sizes = [graph.tensor_by_name[name].size_bytes for name in (*node.inputs, *node.outputs)]
        if node.name.startswith("accumulate_") and dropped.isdisjoint(node.inputs):
            moved_bytes += sum(sizes) + sizes[0]  # the sum is written, too
        if node.phase == "outside":
            moved_bytes += sum(graph.tensor_by_name[name].size_bytes for name in node.outputs)
        if node.phase == "forward" and node.op.rpartition(".")[0] in script.ops_run_before:
            before_s += node.time_s
    return 1e3 * (graph.baseline_time_s - before_s + moved_bytes / hardware.bytes_per_s)


def _every_output(output: Any) -> tuple[int, ...]:
    return tuple(range(len(output))) if isinstance(output, tuple) else (0,)


def _saved_for_backward(graph: Graph) -> set[str]:
    """Tensors that forward makes and backward reads."""
    made = {name for node in graph.forward_nodes for name in node.outputs}
    return made & {name for node in graph.later_nodes for name in node.inputs}


def _live_to_the_end(graph: Graph, names: set[str]) -> Graph:
    """The graph with these tensors as further outputs, so that they are live to the end of the
    step."""
    added = tuple(sorted(names.difference(graph.outputs)))
    return dataclasses.replace(graph, outputs=(*graph.outputs, *added))
