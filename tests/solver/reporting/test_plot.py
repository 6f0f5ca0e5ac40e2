"""The pictures: what is drawn is what was simulated, into whoever's axes, whole or not at all."""

from __future__ import annotations

import dataclasses
import math
import os
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from graphs.synthetic.nets import chain, residual
from solver.chain import computing_blocks
from solver.chain.blocks import split_into_blocks
from solver.plan_analysis.pareto import Curve, sweep
from solver.reporting import plot
from solver.reporting.plot import of_memory as plot_memory
from solver.reporting.plot import of_schedule as plot_schedule
from solver.reporting.plot import style as plot_style
from solver.schedule import Link, Place, Places, Request
from solver.schedule.memory import LAYERS, node_at, occupancy
from solver.schedule.recompute import baseline
from solver.schedule.solution import Solution
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import make, op, plan

GRAPH = residual(n_blocks=5)
PEAK_BYTES = baseline_peak_bytes(GRAPH)


@pytest.fixture(scope="module")
def planned() -> Solution:
    return solve(GRAPH, budget=int(0.8 * PEAK_BYTES), method="sqrt")


@pytest.fixture(scope="module")
def curve() -> Curve:
    budgets = [int(share * PEAK_BYTES) for share in (0.1, 0.6, 0.7, 0.8, 0.9, 1.0)]
    return sweep(
        GRAPH, budgets=budgets, methods=("sqrt", "none"), like=Request(0, time_limit_s=600)
    )


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_memory_is_the_simulated_line(planned):
    axes = plot.memory(planned)
    stairs = [p.get_data() for p in axes.patches if hasattr(p, "get_data")]
    highest = max(max(data.values) for data in stairs)
    assert highest * 1e9 == pytest.approx(PEAK_BYTES) or highest * 1e6 == pytest.approx(PEAK_BYTES)
    widths = sorted({data.edges[-1] for data in stairs})
    assert widths[1] / widths[0] == pytest.approx(
        planned.simulation.time_s / planned.baseline.time_s
    )
    assert any("baseline" in label for label in labels(axes))
    assert "plan: " in axes.get_title(loc="left")
    assert any(label.startswith("budget:") for label in labels(axes))


def covered(axes) -> list[str]:
    """The texts in the axes with a line under them, each with the label of the line."""
    figure = axes.get_figure(root=True)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    outlines = [p for p in axes.patches if hasattr(p, "get_data") and not p.get_fill()]
    found = []
    for text in axes.texts:
        box = Text.get_window_extent(text, renderer)  # of the letters alone, without an arrow
        for line in (*axes.lines, *outlines):
            path = line.get_path().transformed(line.get_transform())
            if path.intersects_bbox(box, filled=False):
                found.append(f"{text.get_text()} on {line.get_label()}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width_in", [plot_style.WIDE_IN, plot_style.NARROW_IN])
@pytest.mark.parametrize("share", [0.75, 0.999, 1.3])
def test_no_name_covers_a_line(share, width_in):
    solution = solve(GRAPH, budget=int(share * PEAK_BYTES), method="sqrt")
    for axes in plot.before_and_after(solution, width_in=width_in):
        assert covered(axes) == []
    alone = plot.memory(solution, width_in=width_in)
    assert covered(alone) == []
    (note,) = [text for text in alone.texts if text.get_text().startswith("peak ")]
    assert note.get_position()[1] > max(solution.request.budget_bytes, PEAK_BYTES) / 1e6
    alone.annotate("over the budget", (alone.get_xlim()[1] / 2, share * PEAK_BYTES / 1e6))
    assert len(covered(alone)) > 0  # it can be seen


def test_memory_without_a_plan():
    nothing = solve(GRAPH, budget=int(0.8 * PEAK_BYTES), method="none")
    axes = plot.memory(nothing)
    assert "no plan fits" in axes.get_title(loc="left")
    assert "with the plan" not in axes.get_title(loc="left")


def stack(axes) -> list:
    """The filled stairs, from below."""
    return [p.get_data() for p in axes.patches if hasattr(p, "get_data") and p.get_fill()]


def test_the_layers_stand_on_one_another_up_to_the_simulated_bytes(planned):
    axes = plot.memory(planned)
    layers = occupancy(GRAPH, planned.schedule)
    shown = [name for name in LAYERS if any(layers.layer_bytes[name])]
    assert labels(axes)[: len(shown)] == [
        "saved activations" if name == "kept" else name for name in shown
    ]
    drawn = stack(axes)
    assert len(drawn) == len(shown) >= 4
    assert all(drawn[0].baseline == 0)
    for below, above in pairwise(drawn):
        assert list(above.baseline) == list(below.values)
    scale = drawn[-1].values.max() / max(layers.total_bytes)
    assert drawn[-1].values == pytest.approx([scale * size for size in layers.total_bytes])
    outline = [p for p in axes.patches if hasattr(p, "get_data") and not p.get_fill()]
    assert len(outline) == 1
    assert outline[0].get_data().values.max() == pytest.approx(scale * PEAK_BYTES)


def test_before_and_after_are_on_the_same_scales(planned):
    above, below = plot.before_and_after(planned)
    assert above.get_xlim() == below.get_xlim()
    assert above.get_ylim() == below.get_ylim()
    assert stack(above)[-1].values.max() / stack(below)[-1].values.max() == pytest.approx(
        PEAK_BYTES / planned.simulation.peak_bytes
    )
    assert "baseline" in above.get_title(loc="left")
    assert "plan: " in below.get_title(loc="left")
    assert above.get_figure() is below.get_figure()
    nothing = solve(GRAPH, budget=int(0.8 * PEAK_BYTES), method="none")
    assert len(plot.before_and_after(nothing)) == 1


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_op_of_the_peak_is_named_where_it_stands(planned):
    for axes, schedule, simulation in zip(
        plot.before_and_after(planned),
        (baseline(GRAPH), planned.schedule),
        (planned.baseline, planned.simulation),
        strict=True,
    ):
        (note,) = [text for text in axes.texts if text.get_text().startswith("peak ")]
        assert note.get_text().endswith(f" at {node_at(GRAPH, schedule, simulation).name}")
        assert note.xy[1] == pytest.approx(stack(axes)[-1].values.max())
        totals = occupancy(GRAPH, schedule).total_bytes
        edges = stack(axes)[-1].edges
        index = totals.index(simulation.peak_bytes)
        assert edges[index] <= note.xy[0] <= edges[index + 1]


def test_the_time_axis_shows_where_the_backward_pass_and_each_block_start(planned):
    blocks = split_into_blocks(GRAPH)
    assert blocks.n_blocks > 1
    axes = plot.memory(planned)
    assert "backward" in texts(axes)
    assert f"forward, {blocks.n_blocks} blocks" in texts(axes)
    (turn,) = [text for text in axes.texts if text.get_text() == "backward"]
    forward_s = sum(node.time_s for node in GRAPH.forward_nodes)
    share = forward_s / planned.simulation.time_s
    assert turn.xy[0] == pytest.approx(share * axes.get_xlim()[1])
    ticks = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    assert [len(segments) for segments in ticks] == [blocks.n_blocks] * 2
    layers = occupancy(GRAPH, planned.schedule)
    forward, backward = plot_memory.block_starts(GRAPH, layers)
    assert [block for _, block in forward] == list(range(1, blocks.n_blocks + 1))
    assert [block for _, block in backward] == list(range(blocks.n_blocks, 0, -1))
    assert forward[0][0] == 0.0
    assert forward_s <= backward[0][0] < backward[-1][0] < planned.simulation.time_s


def test_the_forward_pass_ends_after_its_stalls():
    graph = make(
        [
            op("f", "", "a", time_s=4.0),
            op("g", "", "b", time_s=4.0),
            op("h", "b", "c", time_s=4.0),
            op("q", "a c", "d", time_s=1.0, phase="backward"),
        ],
        {"a": 8, "b": 4, "c": 4, "d": 0},
        outputs="d",
    )
    places = Places(host=Place(100, Link(1.0, 8.0)))
    schedule = plan(graph, "f store:a g -a h -b fetch:a q -a -c drop:a")  # g: 4 to 8 s, store: 12 s
    layers = occupancy(graph, schedule, places=places)
    assert plot_memory._forward_end_s(layers) == 16.0


def test_blocks_have_the_same_numbers_without_the_plan():
    meta = dataclasses.replace(GRAPH.meta, saved_unread={"1.norm": ("stem",)})
    solution = solve(
        dataclasses.replace(GRAPH, meta=meta), budget=int(0.8 * PEAK_BYTES), method="sqrt"
    )
    numbers = [computing_blocks(each).n_blocks for each in (solution.unplanned, solution.graph)]
    assert numbers == [6, 7]
    for axes in plot.before_and_after(solution):
        assert "forward, 7 blocks" in texts(axes)
        ticks = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
        assert [len(segments) for segments in ticks] == [7, 7]


def test_blocks_that_a_step_does_not_have_are_not_marked():
    other = chain(n_blocks=2)  # it shares only the loss, of block 7
    layers = occupancy(other, baseline(other))
    assert plot_memory.block_starts(GRAPH, layers) == ([(2.0, 7)], [(2.0, 7)])


def test_a_long_schedule_is_thinned_and_keeps_its_peak(planned, monkeypatch):
    whole = stack(plot.memory(planned))[-1]
    monkeypatch.setattr(plot_style, "N_COLUMNS", 7)
    few = stack(plot.memory(planned))[-1]
    assert len(few.values) <= 7 < len(whole.values)
    assert few.values.max() == whole.values.max()
    assert (few.edges[0], few.edges[-1]) == (whole.edges[0], whole.edges[-1])


def test_a_reserve_shows_in_the_line_of_the_budget():
    solution = solve(GRAPH, budget=PEAK_BYTES + 1000, reserve=1000, method="none")
    assert any("budget minus reserve" in label for label in labels(plot.memory(solution)))


def test_the_curve_has_a_line_for_each_method_and_marks_the_plan(curve, planned):
    axes = plot.pareto(curve, chosen=planned)
    assert {"sqrt", "none", "proven lower bound"} <= set(labels(axes))
    assert any(label.startswith("this plan: +") for label in labels(axes))
    assert any(label.startswith("baseline fits") for label in labels(axes))
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


def bars(axes, colour: str) -> list[tuple[float, float, int]]:
    """(start, width, row) of the bars of a colour."""
    found = []
    for collection in axes.collections:
        if tuple(collection.get_facecolor()[0]) == to_rgba(colour):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((box.x0, box.width, round(box.y0 + box.height / 2)))
    return found


def test_the_schedule_shows_every_run_in_its_blocks_row(planned):
    axes = plot.schedule(planned)
    assert len(bars(axes, plot_style.BLUE)) == len(GRAPH.forward_nodes)
    assert len(bars(axes, plot_style.ORANGE)) == planned.simulation.n_recomputed > 0
    assert len(bars(axes, plot_style.GREEN)) == len(GRAPH.later_nodes)
    colours = (plot_style.BLUE, plot_style.ORANGE, plot_style.GREEN)
    everything = [bar for colour in colours for bar in bars(axes, colour)]
    assert sum(width for _, width, _ in everything) == pytest.approx(planned.simulation.time_s)
    row_of = {
        name: i
        for i, names in enumerate(split_into_blocks(GRAPH).forward, start=1)
        for name in names
    }
    first_rows = [row for _, _, row in sorted(bars(axes, plot_style.BLUE))]
    assert first_rows == [row_of[node.name] for node in GRAPH.forward_nodes]


def test_the_schedule_shows_what_is_held():
    graph = chain(n_blocks=4)
    whole = solve(graph, budget="1GB", method="none")
    held = [data.values - data.baseline for data in stack(plot.schedule(whole))]
    assert len(held) == split_into_blocks(graph).n_blocks == 5
    full = 2 * plot_schedule.HALF
    # Block 1 is held from its run until its reader in the backward pass has run.
    assert held[0].tolist() == pytest.approx([full] * 9 + [0.0])
    assert held[3].tolist() == pytest.approx([0.0] * 3 + [full] * 3 + [0.0] * 4)
    nothing = solve(graph, budget=2000, method="none")
    assert "no plan fits" in plot.schedule(nothing).get_title(loc="left")


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="removed from their figure"):
        plot.save(axes, tmp_path / "m.png")
