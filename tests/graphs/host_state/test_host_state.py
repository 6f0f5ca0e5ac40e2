"""Optimizer state on the host: bytes and seconds worked out by hand, and the way back."""

import dataclasses
import math
import random

import pytest

from graphs.files import FormatError
from graphs.graph import Graph, GraphError
from graphs.host_state import (
    StateBucket,
    streamed_step_s,
    streamed_workspace_bytes,
    with_state_on_device,
    with_state_on_host,
)
from solver.schedule import Compute, Schedule, baseline, simulate
from tests.support.optimizers import with_some_state, with_state
from tests.support.small_graphs import make, op


def seconds(rate: float, latency_s: float = 0.0):
    return lambda size_bytes: latency_s + size_bytes / rate


def bucket(state_bytes: int, time_s: float, workspace_bytes: int = 0) -> StateBucket:
    return StateBucket(1, state_bytes, workspace_bytes, time_s)


def step() -> Graph:
    return make(
        [op("f", "x", "a"), op("b", "a", "g", phase="backward")],
        {"x": 10, "a": 8, "g": 4},
        outputs="g",
    )


def test_one_bucket_comes_is_stepped_and_leaves():
    assert streamed_step_s([bucket(8, 3.0)], out_s=seconds(2), in_s=seconds(4)) == 2 + 3 + 4
    assert streamed_step_s([], out_s=seconds(2), in_s=seconds(4)) == 0.0


def test_buckets_come_and_go_while_others_are_stepped():
    # in: 0-2, 2-4, 4-6; stepped: 2-5, 5-8, 8-11; out: 5-9, 9-13, 13-17 (the link out binds)
    three = [bucket(8, 3.0)] * 3
    assert streamed_step_s(three, out_s=seconds(2), in_s=seconds(4)) == 17
    # in: 0-2, 2-4, 6-8 (b2 starts at 5 when b1 has ended); stepped 2-5, 5-8; out takes no time
    assert streamed_step_s(three, out_s=seconds(1e18), in_s=seconds(4)) == pytest.approx(11)
    # in: 0-4, 4-8, 8-12; stepped: 4-5, 8-9, 12-13; out: 13-13.
    slow_in = [bucket(8, 1.0)] * 3
    assert streamed_step_s(slow_in, out_s=seconds(1e18), in_s=seconds(2)) == pytest.approx(13)


def test_a_bucket_waits_for_the_memory_of_the_one_before_the_last():
    # in: 0-1, 1-2; b0 stepped 1-1, out 1-9; b1 stepped 2-2, out 9-17; b2 comes from 2 to 3, is
    # stepped when b0 has left, at 9, and leaves from 17 to 25
    three = [bucket(8, 0.0)] * 3
    assert streamed_step_s(three, out_s=seconds(1), in_s=seconds(8)) == 25
    # b3 may come only at 9, when b2 is about to be stepped; stepped at 17
    four = [bucket(8, 0.0)] * 4
    assert streamed_step_s(four, out_s=seconds(1), in_s=seconds(8)) == 33


def test_the_latency_counts_for_each_copy():
    two = [bucket(8, 0.0)] * 2
    assert streamed_step_s(two, out_s=seconds(8, 0.5), in_s=seconds(8, 0.5)) == 1.5 + 1.5 + 1.5


def test_the_workspace_is_that_of_three_buckets():
    sizes = [bucket(1, 0.0), bucket(5, 0.0, 2), bucket(7, 0.0), bucket(2, 0.0, 9)]
    assert streamed_workspace_bytes(sizes) == max(1 + 5, 1 + 5 + 7 + 2, 5 + 7 + 2, 7 + 2 + 9)
    assert streamed_workspace_bytes([]) == 0


def test_state_on_the_host_leaves_the_device():
    graph = with_state(step(), [bucket(20, 1.0), bucket(12, 1.0)], kept_bytes=3, time_s=2.0)
    away = with_state_on_host(graph, out_s=seconds(4), in_s=seconds(4))
    assert graph.resident_bytes - away.resident_bytes == 32
    assert away.host_state_bytes == 32
    found = simulate(away, baseline(away))
    # in 0-5, 5-8; stepped 5-6, 8-9; out 6-11, 11-14
    assert found.time_s == 2 + 14
    assert found.host_peak_bytes == 32
    assert found.live_bytes[-1] == 10 + 3 + 4 + 32
    assert simulate(graph, baseline(graph)).time_s == 2 + 2
    assert away.graph_id == graph.graph_id
    assert away.meta.environment["optimizer"]["state_on_host"] is True


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed: int):
    rng = random.Random(seed)
    graph = with_some_state(step(), rng, most_bytes=9)
    away = with_state_on_host(graph, out_s=seconds(2), in_s=seconds(3))
    assert away != graph
    assert with_state_on_device(away) == graph
    assert with_state_on_device(graph) == graph
    assert with_state_on_host(away, out_s=seconds(2), in_s=seconds(3)) == away
    assert Graph.from_json(away.to_json()) == away


def test_an_optimizer_that_says_no_buckets_keeps_its_state():
    graph = with_state(step(), [bucket(20, 1.0)])
    optimizer = dict(graph.meta.environment["optimizer"])
    for missing in ("buckets", "kept_state_bytes"):
        left = {key: value for key, value in optimizer.items() if key != missing}
        meta = graph.meta.with_environment(optimizer=left)
        other = dataclasses.replace(graph, meta=meta)
        assert with_state_on_host(other, out_s=seconds(1), in_s=seconds(1)) is None
    assert with_state_on_host(step(), out_s=seconds(1), in_s=seconds(1)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("buckets", True),
        ("buckets", [1]),
        ("buckets", [[1, 2, 3]]),
        ("buckets", [[1, -2, 3, 1.0]]),
        ("buckets", [[1.5, 2, 3, 1.0]]),
        ("buckets", [[1, 2, 3, math.nan]]),
        ("kept_state_bytes", None),
        ("kept_state_bytes", "x"),
    ],
)
def test_figures_that_are_none_are_refused(field: str, value: object):
    graph = with_state(step(), [bucket(20, 1.0)])
    optimizer = {**graph.meta.environment["optimizer"], field: value}
    meta = graph.meta.with_environment(optimizer=optimizer)
    with pytest.raises(FormatError, match=f"environment: optimizer: .*{field}"):
        with_state_on_host(dataclasses.replace(graph, meta=meta), out_s=seconds(1), in_s=seconds(1))


def test_an_optimizer_that_is_none_is_refused():
    graph = with_state(step(), [bucket(20, 1.0)])
    graph = dataclasses.replace(graph, meta=graph.meta.with_environment(optimizer=[1]))
    with pytest.raises(FormatError, match=r"environment: optimizer is .1.; expected an object"):
        with_state_on_host(graph, out_s=seconds(1), in_s=seconds(1))


def test_the_stages_of_a_pipeline_keep_their_state():
    graph = with_state(step(), [bucket(20, 1.0)])
    graph = dataclasses.replace(graph, meta=graph.meta.with_environment(pipeline={"stage": 0}))
    assert with_state_on_host(graph, out_s=seconds(1), in_s=seconds(1)) is None


def test_host_bytes_are_checked():
    with pytest.raises(GraphError, match="no node of phase optimizer uses it"):
        dataclasses.replace(step(), host_state_bytes=1)
    with pytest.raises(GraphError, match="host_state_bytes is -1"):
        dataclasses.replace(with_state(step(), [bucket(2, 0.0)]), host_state_bytes=-1)


def test_the_module_alone_has_no_state():
    away = with_state_on_host(
        with_state(step(), [bucket(20, 1.0)]), out_s=seconds(1), in_s=seconds(1)
    )
    part = away.module_part()
    assert part.host_state_bytes == 0
    ops = tuple(op for op in baseline(away).ops if op != Compute("optimizer_step"))
    assert simulate(part, Schedule(ops, part.graph_id)).host_peak_bytes == 0
