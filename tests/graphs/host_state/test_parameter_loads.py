"""Parameters on the host as nodes of the step: worked out by hand, and the way back."""

import dataclasses
import random

import pytest

from graphs.files import FormatError
from graphs.graph import Graph
from graphs.host_state import (
    host_parameter_bytes,
    host_parameters,
    loadable_parameters,
    parameter_loads,
    parameters_on_host,
    with_state_on_device,
    with_state_on_host,
)
from solver.schedule import Compute, Free, Schedule, baseline, simulate
from tests.support.optimizers import with_parameters
from tests.support.small_graphs import make, op

SIZES = {"x": 10, "v": 6, "w": 8, "u": 4, "small": 0, "a": 8, "b": 2, "ga": 3, "gw": 8, "gv": 6}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1)


def seconds(rate):
    return lambda size_bytes: size_bytes / rate


def step() -> Graph:
    """v is read in the backward pass only, u by the optimizer alone."""
    graph = make(
        [
            op("f", "x w", "a"),
            op("g", "a", "b"),
            op("h", "b v", "ga", phase="backward"),
            op("i", "ga w", "gw", phase="backward"),
            op("j", "ga x", "gv", phase="backward"),
        ],
        SIZES,
        outputs="gw gv",
    )
    return with_parameters(graph, ["v", "w", "u", "small"], [(3, 20, 2.0), (1, 5, 1.0)])


def test_they_come_where_they_are_read_first():
    graph = step()
    assert host_parameters(graph) == ("w", "v")
    away = with_state_on_host(graph, out_s=seconds(2), in_s=seconds(4), parameters=("w", "v"))
    assert [node.name for node in away.nodes] == [
        *("load.w", "f", "g", "load.v", "h", "i", "j", "optimizer_step")
    ]
    assert away.node_by_name["load.w"].time_s == 2
    assert away.node_by_name["load.v"].phase == "forward"
    assert away.node_by_name["optimizer_step"].inputs == (
        "gw",
        "gv",
        "u",
        "small",
        "optimizer_state",
    )
    # of the buckets, v w u with 20 + 14 bytes and small with 5
    assert away.host_state_bytes == 25 + 14
    assert host_parameter_bytes(away) == 14
    assert graph.resident_bytes - away.resident_bytes == 25 + 14
    # in 0-8.5, 8.5-9.75; stepped 8.5-10.5, 10.5-11.5; out 10.5-27.5, 27.5-30
    assert away.node_by_name["optimizer_step"].time_s == 30
    assert away.node_by_name["optimizer_step"].workspace_bytes == 34 + 5
    found = simulate(away, baseline(away))
    assert found.time_s == 5 + 2 + 1.5 + 30
    assert found.host_peak_bytes == 39


def test_one_may_be_copied_twice():
    graph = step()
    away = with_state_on_host(graph, out_s=seconds(2), in_s=seconds(4), parameters=("w",))
    once = baseline(away)
    ops = list(once.ops)
    ops.insert(ops.index(Compute("f")) + 1, Free("w"))
    ops.insert(ops.index(Compute("i")), Compute("load.w"))
    twice = Schedule(tuple(ops), away.graph_id)
    assert simulate(away, twice).time_s == simulate(away, once).time_s + 2
    during = [o == Compute("g") for o in twice.ops].index(True)
    before = [o == Compute("g") for o in once.ops].index(True)
    less_bytes = simulate(away, once).live_bytes[before] - simulate(away, twice).live_bytes[during]
    assert less_bytes == 8


@pytest.mark.parametrize("chosen", [(), ("w",), ("v",), ("w", "v")])
def test_there_and_back(chosen):
    graph = step()
    away = with_state_on_host(graph, out_s=seconds(2), in_s=seconds(3), parameters=chosen)
    assert set(parameters_on_host(away.meta.environment).values()) == set(chosen)
    assert with_state_on_device(away) == graph
    again = with_state_on_host(away, out_s=seconds(2), in_s=seconds(3), parameters=chosen)
    assert again == away
    assert Graph.from_json(away.to_json()) == away


def test_which_stay():
    graph = step()
    aliased = dataclasses.replace(
        graph,
        tensors=(*graph.tensors, dataclasses.replace(graph.tensors[0], name="s", alias_of="w")),
    )
    assert loadable_parameters(aliased) == ("v",)
    returned = dataclasses.replace(graph, outputs=(*graph.outputs, "v"))
    assert loadable_parameters(returned) == ("w",)
    nodes = tuple(
        dataclasses.replace(n, phase="outside") if n.name == "h" else n for n in graph.nodes
    )
    assert loadable_parameters(dataclasses.replace(graph, nodes=nodes)) == ("w",)
    assert with_state_on_host(graph, out_s=seconds(1), in_s=seconds(1), parameters=("x",)) is None


def test_a_step_that_does_not_name_its_parameters_keeps_them():
    graph = step()
    optimizer = {**graph.meta.environment["optimizer"], "trains": None}
    other = dataclasses.replace(graph, meta=graph.meta.with_environment(optimizer=optimizer))
    assert host_parameters(other) == ()


@pytest.mark.parametrize("value", [3, ["w"], {"w": 3}])
def test_names_that_are_none_are_refused(value):
    with pytest.raises(FormatError, match="parameters_on_host"):
        parameters_on_host({"optimizer": {"parameters_on_host": value}})


@pytest.mark.slow(sample=20)
@pytest.mark.parametrize("seed", range(40))
def test_random_steps_there_and_back(seed):
    from tests.support.optimizers import with_some_parameters

    rng = random.Random(seed)
    graph = with_some_parameters(seed, rng)
    names = host_parameters(graph)
    chosen = tuple(name for name in names if rng.random() < 0.6)
    away = with_state_on_host(graph, out_s=seconds(2), in_s=seconds(3), parameters=chosen)
    assert with_state_on_device(away) == graph
    bytes_of = {t.name: t.size_bytes for t in graph.tensors}
    assert host_parameter_bytes(away) == sum(bytes_of[name] for name in chosen)
