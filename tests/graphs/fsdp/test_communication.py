"""What a rank of FSDP2 waits for: by hand, against what must hold, and the choice that follows."""

from __future__ import annotations

import random

import pytest

from graphs.fsdp import Sharding, ShardingError, sharding_of
from graphs.fsdp.communication import with_waits
from graphs.fsdp.transform import sharded
from graphs.graph import Graph
from graphs.hardware import Link
from solver import report, solve
from tests.graphs.fsdp.test_fsdp import layers
from tests.scheduler_runtime.export.test_export import small_gpt2, tokens

N = 2


def link(bytes_per_s: float) -> Link:
    return Link("test", "test", bytes_per_s, call_s=0.0, step_s=0.0, source="")


def timed(graph: Graph, bytes_per_s: float) -> Graph:
    sharding = sharding_of(graph.meta.environment)
    assert sharding is not None
    return with_waits(graph, sharding, link(bytes_per_s))


def test_the_waits_of_two_groups_and_the_root() -> None:
    """Operators take a second each; two ranks exchange half of the bytes at a byte per second."""
    graph = timed(sharded(layers(4, 2, 6), Sharding(n_ranks=N, groups=["l0", "l1"])), 1.0)
    waits = {n.name.removeprefix("fsdp: "): n.time_s for n in graph.nodes if n.name[0] == "f"}
    assert {name: time_s for name, time_s in waits.items() if time_s and name[0] != "f"} == {
        "copy out, forward ()": 12.0,  # 24 bytes, from 0 to 12
        "copy out, forward (l0)": 8.0,  # 16 bytes, from 12 to 20
        "copy out, forward (l1)": 3.0,  # 8 bytes, from 20 to 24, beside f0
        "copy out, backward (l1)": 3.0,  # from 26, when the root begins, to 30, beside b2
        "copy out, backward (l0)": 7.0,  # from 30 to 38, beside b1
        "reduce scatter, backward ()": 3.0,  # l1's 8 bytes, from 38 to 42, beside b0
        "reduce scatter, backward (l0)": 12.0 + 8.0,  # the root's, then its own to the end
    }
    assert graph.baseline_time_s == pytest.approx(6 + 56)


@pytest.mark.slow(sample=15)
@pytest.mark.parametrize("seed", range(30))
def test_no_wait_is_longer_than_what_is_sent(seed: int) -> None:
    draw = random.Random(seed)
    rows = [draw.randint(1, 40) for _ in range(draw.randint(2, 6))]
    groups = [f"l{i}" for i in range(len(rows)) if draw.random() < 0.7]
    plain = sharded(
        layers(*rows), Sharding(n_ranks=N, groups=groups, n_replicas=draw.randint(1, 3))
    )
    operators_s = plain.baseline_time_s
    sent_s = timed_alone(plain)
    before_s = operators_s + sent_s
    for bytes_per_s in (1.0, 4.0, 1e9):
        found_s = timed(plain, bytes_per_s).baseline_time_s
        assert max(operators_s, sent_s / bytes_per_s) <= found_s + 1e-9
        assert found_s <= operators_s + sent_s / bytes_per_s + 1e-9
        assert found_s <= before_s + 1e-9
        before_s = found_s
    assert before_s == pytest.approx(operators_s, rel=1e-3)


def timed_alone(graph: Graph) -> float:
    """Seconds of all collectives at a byte per second, one after another, without operators."""
    sharding = sharding_of(graph.meta.environment)
    assert sharding is not None
    size = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
    total_s = 0.0
    for node in graph.nodes:
        if node.op == "fsdp.all_gather":
            total_s += size[node.outputs[0]] / 2
        elif node.op == "fsdp.reduce_scatter":
            total_s += size[node.inputs[0]] / 2
        elif node.op == "fsdp.all_reduce":
            n = sharding.n_replicas
            total_s += 2 * (n - 1) / n * size[node.inputs[0]]
    return total_s


@pytest.mark.slow
def test_whether_to_reshard_is_chosen_by_the_budget(capsys) -> None:
    model, batch = small_gpt2(0.0), tokens()
    either = Sharding(N, reshard_after_forward=None, link="Gloo")
    assert either.link == "gloo"
    roomy = solve(model, batch, budget="1GB", fsdp=either)
    chosen = sharding_of(roomy.environment)
    assert chosen.reshard_after_forward is False
    report(roomy)
    printed = " ".join(capsys.readouterr().out.split())
    assert "for gathers and reductions over gloo on one machine" in printed
    forced = solve(model, batch, budget="1GB", fsdp=Sharding(N, link="gloo"))
    assert roomy.simulation.time_s < forced.simulation.time_s
    tight = solve(model, batch, budget=forced.simulation.peak_bytes, fsdp=either)
    assert tight.simulation.time_s <= forced.simulation.time_s
    assert tight.lower_bound_s <= forced.lower_bound_s


def test_a_link_that_is_none_is_refused() -> None:
    with pytest.raises(ShardingError, match="the link is 'warp'; one of"):
        Sharding(N, link="warp")
