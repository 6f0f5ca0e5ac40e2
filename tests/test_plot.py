"""The pictures: what is drawn is what the judge saw, into whoever's axes, whole or not at all."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
from matplotlib.figure import Figure

from graphs.synthetic import residual
from solver import plot
from solver.pareto import Curve, sweep
from solver.rematerialise import baseline
from solver.simulate import simulate
from solver.solution import Solution
from solver.solve import solve

GRAPH = residual(n_blocks=5)
PEAK_BYTES = simulate(GRAPH, baseline(GRAPH)).peak_bytes


@pytest.fixture(scope="module")
def planned() -> Solution:
    return solve(GRAPH, budget=int(0.8 * PEAK_BYTES), method="sqrt")


@pytest.fixture(scope="module")
def curve() -> Curve:
    budgets = [int(share * PEAK_BYTES) for share in (0.1, 0.6, 0.7, 0.8, 0.9, 1.0)]
    return sweep(GRAPH, budgets=budgets, methods=("sqrt", "none"), time_limit_s=2)


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_memory_is_the_judges_line(planned):
    axes = plot.memory(planned)
    stairs = [p.get_data() for p in axes.patches if hasattr(p, "get_data")]
    highest = max(max(data.values) for data in stairs)
    assert highest * 1e9 == pytest.approx(PEAK_BYTES) or highest * 1e6 == pytest.approx(PEAK_BYTES)
    widths = sorted({data.edges[-1] for data in stairs})
    assert planned.trace is not None
    assert widths[1] / widths[0] == pytest.approx(planned.trace.time_s / planned.baseline.time_s)
    assert any("without checkpointing" in label for label in labels(axes))
    assert any("with the plan" in label for label in labels(axes))
    assert any(label.startswith("budget:") for label in labels(axes))


def test_memory_without_a_plan():
    nothing = solve(GRAPH, budget=int(0.8 * PEAK_BYTES), method="none")
    axes = plot.memory(nothing)
    assert "no plan fits" in axes.get_title(loc="left")
    assert not any("with the plan" in label for label in labels(axes))


def test_a_reserve_shows_in_the_line_of_the_budget():
    solution = solve(GRAPH, budget=PEAK_BYTES + 1000, reserve=1000, method="none")
    assert any("budget less reserve" in label for label in labels(plot.memory(solution)))


def test_the_curve_has_a_line_for_each_method_and_marks_the_plan(curve, planned):
    axes = plot.pareto(curve, chosen=planned)
    assert {"sqrt", "none", "proven lower bound"} <= set(labels(axes))
    assert any(label.startswith("this plan: +") for label in labels(axes))
    assert any(label.startswith("fits without checkpointing") for label in labels(axes))
    line = next(line for line in axes.lines if line.get_label() == "sqrt")
    found = [p for p in curve.of("sqrt") if p.overhead is not None]
    assert list(line.get_ydata()) == pytest.approx([100 * p.overhead for p in found])


def test_budgets_that_fit_nothing_are_shaded(curve):
    impossible = [p for p in curve.points if math.isinf(p.lower_bound_s)]
    assert impossible
    assert "proven: nothing fits" in labels(plot.pareto(curve))


def test_they_draw_into_the_axes_that_they_are_given(planned, curve):
    above, below = Figure().subplots(2)
    assert plot.memory(planned, above) is above
    assert plot.pareto(curve, below) is below


def test_a_graph_whose_ops_take_no_time(planned):
    nodes = tuple(dataclasses.replace(node, time_s=0.0) for node in GRAPH.nodes)
    graph = dataclasses.replace(GRAPH, nodes=nodes)
    plot.memory(solve(graph, budget=PEAK_BYTES, method="none"))


@pytest.mark.parametrize(("name", "start"), [("m.png", b"\x89PNG"), ("m.SVG", b"<?xml")])
def test_files_appear_whole_and_are_repeatable(name, start, planned, tmp_path):
    plot.save(plot.memory(planned), tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(start)
    plot.save(plot.memory(planned), tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert os.listdir(tmp_path) == [name]


def test_no_pyplot_state_is_left(planned):
    plot.memory(planned)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert pyplot.get_fignums() == []


def test_axes_without_a_figure_cannot_be_saved(planned, tmp_path):
    axes = plot.memory(planned)
    axes.remove()
    with pytest.raises(ValueError, match="taken off their figure"):
        plot.save(axes, tmp_path / "m.png")
