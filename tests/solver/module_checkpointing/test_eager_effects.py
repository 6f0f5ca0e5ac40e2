"""What eager mode does beside the graph, and regions of a step that are recomputed as a whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from graphs.graph import Graph, Node, Tensor
from graphs.trace import trace
from solver.module_checkpointing.eager_effects import EagerStep
from solver.module_checkpointing.region_plan import plan_regions
from solver.module_checkpointing.regions import CheckpointRegion, RegionError, dropped_by
from solver.schedule.ops import Compute, Free


def step(**meta: object) -> Graph:
    """x -> a -> b -> c, in modules m (a, b) and "" (c); the backward reads c, then b and a at once.

    a, b, c take 100, 10 and 1 bytes; the gradients 5 each.
    """
    sizes = {"x": 7, "a": 100, "b": 10, "c": 1, "gc": 5, "gb": 5, "ga": 5}
    kinds = {"x": "input", "ga": "gradient"}
    wiring = {
        "f": ("a", ("x",), "forward", "m.first"),
        "g": ("b", ("a",), "forward", "m.second"),
        "h": ("c", ("b",), "forward", ""),
        "bh": ("gc", ("c",), "backward", ""),
        "bg": ("gb", ("gc", "b"), "backward", "m.second"),
        "bf": ("ga", ("gb", "a"), "backward", "m.second"),
    }
    nodes = tuple(
        Node(name, f"op.{name}", inputs, (out,), 1.0, 0, phase, phase == "forward", module)
        for name, (out, inputs, phase, module) in wiring.items()
    )
    tensors = tuple(Tensor(n, size, kinds.get(n, "activation")) for n, size in sizes.items())
    return Graph(nodes=nodes, tensors=tensors, outputs=("ga",), meta=meta)


def whole(graph: Graph) -> CheckpointRegion:
    nodes = tuple(n.name for n in graph.forward_nodes if n.module.startswith("m"))
    return CheckpointRegion(nodes, modules=("m",))


def test_a_region_is_recomputed_at_once_when_the_first_of_it_is_missing() -> None:
    graph = step()
    plan = plan_regions(graph, [whole(graph)])
    order = [op.node for op in plan.schedule.ops if isinstance(op, Compute)]
    assert order == ["f", "g", "h", "bh", "f", "g", "bg", "bf"]
    assert plan.n_recomputations == {"m": 1}
    # with f, g and bg: x, a, b, gc, gb; without the region a and b are there all the time
    assert plan.simulation.peak_bytes == 7 + 100 + 10 + 5 + 5
    assert Free("a") in plan.schedule.ops[: plan.schedule.ops.index(Compute("bh"))]


def test_what_a_region_saves_is_not_recomputed_but_triggers_the_rest() -> None:
    """The first tensor that the backward pass asks for is a saved one: PyTorch runs all then."""
    graph = step()
    region = dataclasses.replace(whole(graph), saved=frozenset({"g"}))
    ops = plan_regions(graph, [region]).schedule.ops
    order = [op.node for op in ops if isinstance(op, Compute)]
    assert order == ["f", "g", "h", "bh", "f", "bg", "bf"]
    assert ops.index(Free("b")) < ops.index(Compute("bf"))


def test_a_backward_function_holds_all_that_it_reads_until_its_end() -> None:
    together = step(backward_functions=[["bg", "bf"]])
    region = dataclasses.replace(whole(together), saved=frozenset({"g"}))
    ops = plan_regions(together, [region]).schedule.ops
    assert ops.index(Free("b")) > ops.index(Compute("bf"))
    assert ops.index(Free("gc")) > ops.index(Compute("bf"))


def test_a_region_that_overwrites_what_it_reads_is_refused() -> None:
    graph = step(in_place=["g"])
    second = CheckpointRegion(("g",), modules=("m.second",))
    with pytest.raises(RegionError, match=r"'a', which module 'm.second' reads, is overwritten"):
        dropped_by(graph, second)
    assert dropped_by(graph, whole(graph))  # x is not overwritten
    assert dropped_by(step(), second)


def test_operators_in_place_live_where_they_write() -> None:
    eager = EagerStep.of(step(in_place=["g", "h"]))
    assert eager.last_write == {"a": 2, "b": 2, "c": 2}
    assert EagerStep.of(step(in_place=["h"])).last_write == {"b": 2, "c": 2}


@pytest.mark.parametrize("junk", [None, 3, "f", ["nobody", 4], [["bg", 7], None], {"f": 1}])
def test_malformed_metadata_of_a_file_is_ignored(junk: object) -> None:
    eager = EagerStep.of(step(in_place=junk, backward_functions=junk))
    assert eager.in_place == frozenset()
    assert eager.function_of == {}


def test_the_trace_names_operators_in_place_and_backward_functions() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)
    )
    graph = trace(model, torch.randn(3, 4), loss=lambda output, _batch: output.sum())
    eager = EagerStep.of(graph)
    written = [graph.node_by_name[name].op for name in sorted(eager.in_place)]
    assert "aten.relu.default" in written
    assert "aten._native_batch_norm_legit_functional.default" not in written
    functions = {tuple(graph.node_by_name[n].op for n in f) for f in eager.function_of.values()}
    assert ("aten.mm.default", "aten.mm.default", "aten.sum.dim_IntList") in functions
