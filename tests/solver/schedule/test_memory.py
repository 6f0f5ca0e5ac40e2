"""The layers of the memory plot add up to the simulator's figure, and each is what it says."""

from __future__ import annotations

import dataclasses

import pytest

from graphs.synthetic.nets import chain, residual
from solver.schedule.memory import LAYERS, occupancy
from solver.schedule.ops import Compute, Schedule
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import make, op, plan, random_step


def computed_bytes(graph, schedule: Schedule) -> tuple[int, ...]:
    """The simulator's bytes during each compute."""
    live_bytes = simulate(graph, schedule).live_bytes
    return tuple(
        size for op, size in zip(schedule.ops, live_bytes, strict=True) if isinstance(op, Compute)
    )


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    "graph", [chain(n_blocks=6), residual(n_blocks=5), *map(random_step, range(20))]
)
def test_the_layers_add_up_to_the_simulated_bytes(graph):
    peak_bytes = baseline_peak_bytes(graph)
    schedules = [baseline(graph)]
    found = solve(graph, budget=int(0.9 * peak_bytes), time_limit_s=600).schedule
    if found is not None:
        schedules.append(found)
    for schedule in schedules:
        layers = occupancy(graph, schedule)
        assert layers.total_bytes == computed_bytes(graph, schedule)
        assert layers.edges_s[-1] == pytest.approx(simulate(graph, schedule).time_s)
        assert len(layers.edges_s) == len(layers.nodes) + 1


def test_what_each_layer_is():
    graph = make(
        [
            op("f", "x", "a"),
            op("h", "a", "b", time_s=2),
            op("out", "b", "c", phase="outside", workspace_bytes=7),
            op("back", "b a c", "g", phase="backward"),
            op("step", "g", "", phase="optimizer", workspace_bytes=3),
        ],
        {"x": 1, "a": 10, "b": 100, "c": 1000, "g": 10000},
        outputs="g",
    )
    schedule = plan(graph, "f h -a out f back -a -b -c step")
    layers = occupancy(graph, schedule)
    assert [node.name for node in layers.nodes] == ["f", "h", "out", "f", "back", "step"]
    assert layers.edges_s == (0, 1, 3, 4, 5, 6, 7)
    assert layers.layer_bytes == {
        "resident": (1,) * 6,
        "others in flight": (0,) * 6,
        "kept": (10, 110, 1100, 1100, 1100, 0),
        "recomputed": (0, 0, 0, 10, 10, 0),
        "gradients": (0, 0, 0, 0, 10000, 10000),
        "workspace": (0, 0, 7, 0, 0, 3),
    }
    assert tuple(layers.layer_bytes) == LAYERS


def test_what_overwrites_an_activation_is_what_it_is_now():
    graph = make(
        [
            op("f", "x", "a", recomputable=False),
            dataclasses.replace(op("back", "a", "g", phase="backward"), overwrites="a"),
            op("step", "g", "", phase="optimizer"),
        ],
        {"x": 1, "a": 10, "g": 10},
        aliases={"g": "a"},
        outputs="g",
    )
    layers = occupancy(graph, baseline(graph))
    assert layers.layer_bytes["kept"] == (10, 0, 0)
    assert layers.layer_bytes["gradients"] == (0, 10, 10)


def test_an_output_that_is_still_live_is_counted_twice_while_it_is_recomputed():
    graph = make(
        [
            op("f", "x", "a b"),
            op("g", "a b", "c"),
            op("back", "a b c", "d", phase="backward"),
        ],
        {"x": 1, "a": 10, "b": 100, "c": 1000, "d": 10000},
        outputs="d",
    )
    schedule = plan(graph, "f g -b f back")
    assert occupancy(graph, schedule).total_bytes == computed_bytes(graph, schedule)
    layers = occupancy(graph, schedule).layer_bytes
    assert layers["kept"] == (110, 1110, 1010, 1000)
    assert layers["recomputed"] == (0, 0, 110, 110)


def test_a_storage_is_live_as_long_as_a_view_of_it_is():
    graph = make(
        [
            op("f", "x", "a"),
            op("view", "a", "v", time_s=0),
            op("back", "v", "g", phase="backward"),
        ],
        {"x": 1, "a": 10, "v": 10, "g": 100},
        aliases={"v": "a"},
        outputs="g",
    )
    schedule = plan(graph, "f view -a back -v")
    assert occupancy(graph, schedule).layer_bytes["kept"] == (10, 10, 10)
    assert occupancy(graph, schedule).total_bytes == computed_bytes(graph, schedule)
