"""Graph: validation errors, the file format, and what graph_id depends on."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from graphs.files import FormatError
from graphs.graph import Graph, GraphError, Node, Tensor
from tests.support.paths import DATA
from tests.support.small_graphs import make, op, random_step


@pytest.fixture
def step() -> Graph:
    return Graph(
        nodes=(
            Node("mm", "aten.mm", ("x", "w"), ("h", "stats"), 1.5, 64, module="blocks.0.mlp"),
            Node("view", "aten.view", ("h",), ("h.view",), 0.0, recomputable=False),
            Node("loss", "aten.sum", ("h.view",), ("loss",), 0.5, phase="outside"),
            Node("mm.grad", "aten.mm", ("x", "stats"), ("grad.w",), 3.0, phase="backward"),
            Node("adam", "adam", ("grad.w", "moment"), (), 1.0, 99, phase="optimizer"),
        ),
        tensors=(
            Tensor("x", 8, "input"),
            Tensor("w", 16, "parameter"),
            Tensor("w.view", 16, "parameter", alias_of="w"),
            Tensor("moment", 32, "optimizer_state"),
            Tensor("h", 4),
            Tensor("stats", 0, copyable=False),
            Tensor("h.view", 4, alias_of="h"),
            Tensor("loss", 4, "output"),
            Tensor("grad.w", 16, "gradient"),
        ),
        outputs=("loss", "grad.w"),
        meta={"model": "two matrices"},
    )


def test_what_a_graph_answers(step: Graph) -> None:
    assert [n.name for n in step.forward_nodes] == ["mm", "view"]
    assert [n.name for n in step.later_nodes] == ["loss", "mm.grad", "adam"]
    assert [t.name for t in step.resident] == ["x", "w", "w.view", "moment"]
    assert step.resident_bytes == 8 + 16 + 32  # a view of a parameter adds nothing
    assert step.baseline_time_s == 6.0
    assert step.producer["stats"].name == "mm"
    assert [n.name for n in step.consumers["h"]] == ["view"]
    assert step.consumers["w.view"] == ()
    assert (step.root("h.view"), step.root("h"), step.root("w.view")) == ("h", "h", "w")
    assert step.views == {"h": ("h.view",)}
    assert step.node_by_name["adam"].workspace_bytes == 99
    assert step.tensor_by_name["h"].size_bytes == 4


def test_frozen(step: Graph) -> None:
    with pytest.raises(FrozenInstanceError):
        step.nodes[0].time_s = 0.0
    with pytest.raises(FrozenInstanceError):
        step.outputs = ()


def test_an_empty_graph_is_a_graph() -> None:
    graph = Graph(nodes=(), tensors=())
    assert (graph.resident_bytes, graph.baseline_time_s) == (0, 0.0)
    assert Graph.from_json(graph.to_json()) == graph


def swap(graph: Graph, what: str, which: str, /, **changes: Any) -> Graph:
    def changed(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(item, **changes) if item.name == which else item for item in items)

    if what == "node":
        return replace(graph, nodes=changed(graph.nodes))
    return replace(graph, tensors=changed(graph.tensors))


@pytest.mark.parametrize(
    ("kind", "name", "changes", "message"),
    [
        ("tensor", "x", {"name": ""}, "tensor has an empty name"),
        ("tensor", "x", {"name": "w"}, "two tensors are called 'w'"),
        ("tensor", "x", {"size_bytes": -1}, "tensor 'x': size_bytes is -1"),
        ("tensor", "x", {"size_bytes": 2**60 + 1}, "must be from 0 to 2"),
        ("tensor", "x", {"kind": "weight"}, "tensor 'x': kind is 'weight'; one of parameter"),
        ("tensor", "h.view", {"alias_of": "y"}, "alias_of is 'y', which is not a tensor"),
        ("tensor", "h.view", {"alias_of": "w.view"}, "itself an alias of 'w'"),
        ("tensor", "h.view", {"alias_of": "h.view"}, "itself an alias"),
        ("tensor", "w.view", {"alias_of": "h"}, "no node outputs the alias"),
        ("node", "mm", {"name": ""}, "node has an empty name"),
        ("node", "mm", {"name": "view"}, "two nodes are called 'view'"),
        ("node", "mm", {"inputs": ("x", "y")}, "node 'mm' reads 'y', which is not a tensor"),
        ("node", "mm", {"outputs": ("h", "stats", "y")}, "makes 'y', which is not a tensor"),
        ("node", "mm", {"inputs": ("x", "loss")}, "which 'loss' makes later"),
        ("node", "mm", {"inputs": ("x", "h")}, "which 'mm' makes later"),
        ("node", "mm", {"outputs": ("h", "h", "stats")}, "tensor 'h' is made twice"),
        ("node", "view", {"outputs": ("h.view", "stats")}, "'stats' is made twice"),
        ("node", "mm", {"phase": "sideways"}, "phase is 'sideways'; one of forward"),
        ("node", "mm", {"phase": "backward"}, "comes after a node of phase backward"),
        ("node", "mm", {"time_s": -1.0}, "time_s is -1.0"),
        ("node", "mm", {"time_s": float("nan")}, "time_s is nan"),
        ("node", "mm", {"time_s": float("inf")}, "time_s is inf"),
        ("node", "mm", {"workspace_bytes": -1}, "workspace_bytes is -1"),
        ("node", "mm", {"workspace_bytes": 2**61}, "workspace_bytes is 2305843009213693952"),
    ],
)
def test_refused(step: Graph, kind: str, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        swap(step, kind, name, **changes)


def test_refused_outputs(step: Graph) -> None:
    with pytest.raises(GraphError, match="outputs names 'y', which is not a tensor"):
        replace(step, outputs=("y",))
    with pytest.raises(GraphError, match="outputs names a tensor twice"):
        replace(step, outputs=("loss", "loss"))


def test_a_view_before_its_root_is_refused() -> None:
    with pytest.raises(GraphError, match="made before 'a', whose alias it is"):
        make(
            [op("v", "x", "view"), op("f", "x", "a")],
            {"x": 1, "a": 1, "view": 1},
            aliases={"view": "a"},
        )


def test_round_trip(step: Graph, tmp_path: Path) -> None:
    step.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json")
    assert again == step
    assert again.meta == step.meta
    written = {tensor["name"]: tensor for tensor in step.to_json()["tensors"]}
    assert written["stats"]["copyable"] is False
    assert "copyable" not in written["h"]
    assert again.graph_id == step.graph_id
    assert list(tmp_path.iterdir()) == [tmp_path / "graph.json"]


@pytest.mark.slow(sample=20)
@pytest.mark.parametrize("seed", range(60))
def test_round_trip_of_odd_graphs(seed: int) -> None:
    graph = random_step(seed)
    text = json.dumps(graph.to_json())
    assert Graph.from_json(json.loads(text)) == graph


def test_the_shipped_instance_loads() -> None:
    graph = Graph.load(DATA / "gpt2_small_b8_t1024.json")
    assert len(graph.nodes) == 364
    assert Graph.from_json(graph.to_json()).graph_id == graph.graph_id


def test_optional_fields_may_be_left_out(step: Graph) -> None:
    value = step.to_json()
    del value["meta"]
    for tensor in value["tensors"]:
        if tensor["alias_of"] is None:
            del tensor["alias_of"]
    for node in value["nodes"]:
        for name, default in (("workspace_bytes", 0), ("recomputable", True), ("module", "")):
            if node[name] == default:
                del node[name]
    value["later"] = "fields of another version are passed over"
    assert Graph.from_json(value) == step


@pytest.mark.parametrize(
    ("where", "bad", "message"),
    [
        (("format",), "graph/3", "'format' is 'graph/3'; expected 'graph/2' or 'graph/1'"),
        (("format",), None, "field 'format'"),
        (("tensors",), {}, "field 'tensors' is {}; expected a list"),
        (("tensors", 0), 7, r"tensors\[0\]: expected an object, got 7"),
        (("tensors", 0, "name"), 7, r"tensors\[0\]: field 'name' is 7; expected a string"),
        (("tensors", 0, "size_bytes"), -1, "expected an integer from 0 to"),
        (("tensors", 0, "size_bytes"), 1.5, "field 'size_bytes' is 1.5"),
        (("tensors", 0, "size_bytes"), True, "field 'size_bytes' is True"),
        (("tensors", 0, "size_bytes"), "8", "field 'size_bytes' is '8'"),
        (("tensors", 0, "size_bytes"), 2**62, "tensor 'x': size_bytes"),
        (("tensors", 0, "kind"), "weight", "one of parameter, buffer"),
        (("tensors", 0, "alias_of"), 3, "field 'alias_of' is 3"),
        (("nodes",), "mm", "field 'nodes'"),
        (("nodes", 1), [], r"nodes\[1\]: expected an object"),
        (("nodes", 0, "op"), None, "field 'op'"),
        (("nodes", 0, "inputs"), "xw", "field 'inputs' is 'xw'; expected a list"),
        (("nodes", 0, "inputs"), ["x", 3], "expected a string in UTF-8"),
        (("nodes", 0, "inputs"), ["nobody"], "reads 'nobody', which is not a tensor"),
        (("nodes", 0, "time_s"), -1, "field 'time_s'"),
        (("nodes", 0, "time_s"), "1", "expected a number"),
        (("nodes", 0, "time_s"), float("nan"), "field 'time_s'"),
        (("nodes", 0, "workspace_bytes"), -5, "field 'workspace_bytes'"),
        (("nodes", 0, "phase"), "sideways", "one of forward, outside, backward, optimizer"),
        (("nodes", 0, "recomputable"), 1, "expected true or false"),
        (("nodes", 0, "module"), 1, "field 'module'"),
        (("outputs",), "loss", "field 'outputs'"),
        (("outputs",), ["nobody"], "outputs names 'nobody'"),
        (("meta",), [], "field 'meta'"),
    ],
)
def test_a_file_is_refused_with_the_field(
    step: Graph, where: tuple[Any, ...], bad: object, message: str
) -> None:
    value: Any = copy.deepcopy(step.to_json())
    inner = value
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = bad
    with pytest.raises(FormatError, match=message):
        Graph.from_json(value)


@pytest.mark.parametrize("missing", ["format", "tensors", "nodes", "outputs"])
def test_a_missing_field_is_named(step: Graph, missing: str) -> None:
    value = step.to_json()
    del value[missing]
    with pytest.raises(FormatError, match=f"field '{missing}' is missing"):
        Graph.from_json(value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "nope", "\xff"])
def test_a_truncated_file_is_no_graph(tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"graph\.json"):
        Graph.load(path)


def test_graph_id_is_stable(step: Graph) -> None:
    """Files of other processes and versions refer to it: this value must not change."""
    assert step.graph_id == (
        "sha256:022531360dda4e1792014a80f0ffa536ea792523c4bf67b90692cad5f6ca07bd"
    )


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("node", "mm", {"time_s": 9.0}),
        ("node", "mm", {"workspace_bytes": 9}),
        ("node", "mm", {"recomputable": False}),
        ("node", "mm", {"module": "elsewhere"}),
        ("node", "adam", {"op": "sgd"}),
        ("tensor", "h", {"kind": "output"}),
        ("tensor", "moment", {"size_bytes": 64}),
    ],
)
def test_graph_id_passes_over_cost_and_optimizer(
    step: Graph, kind: str, name: str, changes: dict[str, Any]
) -> None:
    assert swap(step, kind, name, **changes).graph_id == step.graph_id


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("node", "mm.grad", {"name": "other"}),
        ("node", "mm", {"op": "aten.bmm"}),
        ("node", "mm", {"inputs": ("x",)}),
        ("node", "mm", {"inputs": ("w", "x")}),
        ("node", "mm", {"outputs": ("stats", "h")}),
        ("node", "mm.grad", {"inputs": ("x", "h")}),
        ("node", "loss", {"phase": "backward"}),
        ("node", "view", {"phase": "outside"}),
        ("tensor", "h", {"size_bytes": 5}),
        ("tensor", "w.view", {"alias_of": None}),
        ("tensor", "w.view", {"alias_of": "x"}),
    ],
)
def test_graph_id_follows_the_structure(
    step: Graph, kind: str, name: str, changes: dict[str, Any]
) -> None:
    assert swap(step, kind, name, **changes).graph_id != step.graph_id


def test_graph_id_follows_outputs_and_order(step: Graph) -> None:
    assert replace(step, outputs=("grad.w", "loss")).graph_id != step.graph_id
    assert replace(step, outputs=("grad.w",)).graph_id != step.graph_id
    assert replace(step, meta={"other": 1}).graph_id == step.graph_id
    nodes = (*step.nodes[:2], *step.nodes[3:])
    tensors = tuple(t for t in step.tensors if t.name != "loss")
    assert Graph(nodes, tensors, ("grad.w",)).graph_id != step.graph_id


def test_module_part_leaves_out_what_the_caller_runs(step: Graph) -> None:
    part = step.module_part()
    assert [n.name for n in part.nodes] == ["mm", "view", "mm.grad"]
    assert [t.name for t in part.tensors] == ["x", "w", "h", "stats", "h.view", "grad.w"]
    assert part.outputs == ("grad.w",)
    assert part.meta == step.meta
    assert part.module_part() == part


def test_gradients_from_the_caller_are_resident_in_the_module_part() -> None:
    graph = make(
        [
            op("f", "x", "y"),
            op("criterion", "y target", "grad.y loss", phase="outside"),
            op("b", "grad.y x", "grad.x", phase="backward"),
        ],
        {"x": 2, "target": 4, "y": 8, "grad.y": 8, "loss": 1, "grad.x": 2},
        outputs="loss grad.x",
    )
    part = graph.module_part()
    assert part.resident_bytes == 2 + 8  # the gradient that comes back is the caller's
    assert part.outputs == ("grad.x",)
    assert "loss" not in part.tensor_by_name


@pytest.fixture
def in_place() -> Graph:
    """b makes g, c overwrites it with h, d overwrites that with k, and e reads k."""
    nodes = [
        op("f", "x", "a"),
        op("b", "a", "g", phase="backward"),
        op("c", "g a", "h", phase="backward"),
        op("d", "h", "k", phase="backward"),
        op("e", "k", "out", phase="backward"),
    ]
    nodes[2:4] = [replace(nodes[2], overwrites="g"), replace(nodes[3], overwrites="h")]
    sizes = dict.fromkeys(["x", "a", "g", "h", "k", "out"], 8)
    return make(nodes, sizes, aliases={"h": "g", "k": "g"}, outputs="out")


def test_an_overwrite_is_part_of_the_structure_and_of_the_file(in_place: Graph) -> None:
    assert in_place.resident_bytes == 8
    value = json.loads(json.dumps(in_place.to_json()))
    assert value["format"] == "graph/2"
    assert Graph.from_json(value) == in_place
    nodes = tuple(replace(node, overwrites=None) for node in in_place.nodes)
    assert replace(in_place, nodes=nodes).graph_id != in_place.graph_id


MUTANTS = {
    "the old tensor is read afterwards": ("e", {"inputs": ("k", "h")}, "reads 'h', which 'd' has"),
    "its root is read afterwards": ("d", {"inputs": ("h", "g")}, "reads 'g', which 'c' has"),
    "it is no input": ("c", {"inputs": ("a",)}, "not one of its inputs"),
    "it is a saved activation": ("c", {"overwrites": "a"}, "makes or reads it, may run again"),
    "it is resident": ("c", {"inputs": ("x", "g"), "overwrites": "x"}, "which is resident"),
    "the output has a storage of its own": ("e", {"overwrites": "k"}, "an alias on that storage"),
    "two outputs": ("d", {"outputs": ("k", "more")}, "one output must be an alias"),
    "an alias of nothing that is read": ("e", {"outputs": ("out", "late")}, "what is there now"),
}


@pytest.mark.parametrize(("name", "changes", "message"), MUTANTS.values(), ids=list(MUTANTS))
def test_an_overwrite_of_what_is_still_needed_is_no_graph(
    in_place: Graph, name: str, changes: dict[str, Any], message: str
) -> None:
    nodes = tuple(replace(n, **changes) if n.name == name else n for n in in_place.nodes)
    tensors = (*in_place.tensors, Tensor("more", 8))
    if "late" in changes.get("outputs", ()):
        nodes = (*nodes[:-1], replace(nodes[-1], inputs=("a",)))
        tensors = (*tensors, Tensor("late", 8, alias_of="g"))
    if "more" not in changes.get("outputs", ()):
        tensors = tuple(tensor for tensor in tensors if tensor.name != "more")
    with pytest.raises(GraphError, match=message):
        replace(in_place, nodes=nodes, tensors=tensors)


def test_an_overwrite_through_an_alias_of_what_is_resident_is_no_graph(in_place: Graph) -> None:
    nodes = (*in_place.nodes[:-1], replace(in_place.nodes[-1], outputs=("v",)))
    last = op("o", "v", "out", phase="backward")
    tensors = [replace(t, alias_of="x") if t.name == "out" else t for t in in_place.tensors]
    with pytest.raises(GraphError, match="'o' overwrites 'v', which is resident"):
        replace(
            in_place,
            nodes=(*nodes, replace(last, overwrites="v")),
            tensors=(*tensors, Tensor("v", 8, alias_of="x")),
        )


def test_an_overwritten_output_is_no_graph(in_place: Graph) -> None:
    with pytest.raises(GraphError, match="outputs names 'h', which 'd' has overwritten"):
        replace(in_place, outputs=("h", "out"))
