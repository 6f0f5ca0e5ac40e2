"""A stage of a pipeline as one rank of FSDP2 runs it: the transform by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphs.fsdp import MixedPrecision, Sharding, sharded_stage
from graphs.graph import Graph
from graphs.training_step import with_accumulation
from tests.graphs.fsdp.test_fsdp import layers
from tests.graphs.fsdp.test_mixed_precision import in_half

N, GROUPS = 2, ["l0", "l1"]


def stage(graph: Graph, **options: object) -> Graph:
    n_layers = len(graph.forward_nodes)
    gradients = {f"g{i}": f"w{i}" for i in range(n_layers)}
    graph = with_accumulation(graph, gradients)
    on_cpu = bool(options.pop("on_cpu", False))
    kept = {"reshard_after_forward": False, "accumulates_whole": True}
    sharding = Sharding(n_ranks=N, groups=GROUPS, **kept, **options)
    return sharded_stage(graph, sharding, n_microbatches=4, on_cpu=on_cpu)


def workspace(graph: Graph) -> dict[str, int]:
    return {n.name: n.workspace_bytes for n in graph.nodes if n.op.startswith("fsdp.")}


def test_parameters_and_sums_are_whole_for_all_micro_batches() -> None:
    graph = stage(layers(4, 6))
    kinds = dict.fromkeys(("parameter", "gradient"), 0)
    for tensor in graph.resident:
        if tensor.kind in kinds:
            kinds[tensor.kind] += tensor.size_bytes
    shards, whole = (16 + 24) // N, 16 + 24
    assert kinds == {"parameter": shards + whole, "gradient": whole}
    names = [node.name for node in graph.nodes]
    # each gradient is added to its sum when it is there, and all are reduced after the last
    added = [name for name in names if "add gradient" in name]
    reduced = [name for name in names if "reduce scatter" in name]
    assert [name.rpartition("(")[2] for name in added] == ["l1.weight)", "l0.weight)"]
    assert names[-2:] == reduced
    assert {graph.node_by_name[name].phase for name in reduced} == {"optimizer"}
    assert not [name for name in names if "backward" in name and "gather" in name]


def test_what_is_not_there_in_the_first_forward_pass_makes_room_for_its_gathers() -> None:
    assert set(workspace(stage(layers(4, 6))).values()) == {0}
    # On the CPU what l0 gathers takes twice 16; nothing else is there of 16 + 24 and as much again.
    on_cpu = workspace(stage(layers(4, 6), on_cpu=True))
    assert on_cpu["fsdp: all gather, forward (l0)"] == 0
    # l1: the buffer of l0, twice 24; of what is resident here only the parameters of l0 are there.
    assert on_cpu["fsdp: all gather, forward (l1)"] == max(0, 16 + 2 * 24 - (2 * 40 - 16))
    # l0 reduces when only its whole parameters are gone: then its sums, for the shard and gloo
    assert on_cpu["fsdp: reduce scatter, optimizer (l0)"] == 16 + 8 + 16 + 12 - 2 * 16
    # then l1: l0 has left a shard of its gradient, and freed parameters and sums
    freed = 2 * 16 - 8
    assert on_cpu["fsdp: reduce scatter, optimizer (l1)"] == max(
        0, 24 + 12 + 24 + 12 - 2 * 24 - freed
    )


@pytest.mark.parametrize(("reduce_dtype", "element_bytes"), [("float32", 4), ("float64", 8)])
def test_sums_are_in_the_dtype_that_is_reduced(reduce_dtype: str, element_bytes: int) -> None:
    policy = MixedPrecision("float32", reduce_dtype)
    graph = stage(in_half(layers(4, 6)), mp_policy=policy)
    sums = [tensor.size_bytes for tensor in graph.resident if tensor.kind == "gradient"]
    assert sum(sums) == 10 * element_bytes


def test_torch_2_15_reduces_the_last_group_first() -> None:
    for release, order in (("2.14.1", ["l0", "l1"]), ("2.15.0", ["l1", "l0"])):
        graph = layers(4, 6)
        meta = graph.meta.with_environment(torch=release)
        names = [node.name for node in stage(replace(graph, meta=meta)).nodes]
        assert names[-2:] == [f"fsdp: reduce scatter, optimizer ({path})" for path in order]
