"""The two file formats: round trips, and errors for malformed files that name the field."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from graphs.files import MAX_FILE_BYTES, FormatError, write_json, write_whole
from graphs.graph import Graph
from solver.schedule.ops import Compute, Free
from solver.schedule.simulator import IllegalScheduleError
from solver.schedule.solution import SavedSchedule, Solution
from solver.solving import solve


def a_graph() -> dict:
    """x -> f -> a -> loss -> y, and back."""
    return {
        "format": "graph/1",
        "meta": {},
        "outputs": ["grad"],
        "tensors": [
            {"name": "x", "size_bytes": 10, "kind": "input"},
            {"name": "a", "size_bytes": 100, "kind": "activation"},
            {"name": "b", "size_bytes": 100, "kind": "activation"},
            {"name": "y", "size_bytes": 4, "kind": "output"},
            {"name": "grad", "size_bytes": 10, "kind": "gradient"},
        ],
        "nodes": [
            node("f", ["x"], ["a"], "forward"),
            node("g", ["a"], ["b"], "forward"),
            node("loss", ["b"], ["y"], "forward"),
            node("back", ["y", "a", "b"], ["grad"], "backward"),
        ],
    }


def node(name: str, inputs: list, outputs: list, phase: str) -> dict:
    return {
        "name": name,
        "op": "aten.op",
        "inputs": inputs,
        "outputs": outputs,
        "time_s": 1.0,
        "phase": phase,
    }


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_graph_comes_back_as_it_was(tmp_path):
    graph = Graph.load(written(tmp_path, a_graph()))
    graph.save(tmp_path / "again.json")
    assert Graph.load(tmp_path / "again.json") == graph
    assert Graph.load(tmp_path / "again.json").graph_id == graph.graph_id


def changed(*path: str | int, value: object) -> dict:
    """A good graph with one field replaced."""
    graph = a_graph()
    place = graph
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return graph


def without(*path: str | int) -> dict:
    graph = a_graph()
    place = graph
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return graph


HOSTILE_GRAPHS = {
    "not an object": ([1, 2], "expected an object"),
    "null": (None, "expected an object"),
    "a number": (5, "expected an object"),
    "no format": (without("format"), "'format' is missing"),
    "another format": (changed("format", value="graph/3"), "expected 'graph/2' or 'graph/1'"),
    "a schedule": (
        changed("format", value="schedule/1"),
        "this is a schedule file; a graph file is expected here",
    ),
    "a node overwrites, before any could": (
        changed("nodes", 3, "overwrites", value="a"),
        "'overwrites' is 'a', which a file of an older .*expected 'format' 'graph/2'",
    ),
    "rewrites before there were any": (
        changed("meta", value={"rewrites": ["in_place"]}),
        r"meta: field 'rewrites' is \['in_place'\].*expected 'format' 'graph/2'",
    ),
    "format is a list": (changed("format", value=[[]]), "expected 'graph/2' or 'graph/1'"),
    "no nodes": (without("nodes"), "'nodes' is missing"),
    "no tensors": (without("tensors"), "'tensors' is missing"),
    "no outputs": (without("outputs"), "'outputs' is missing"),
    "nodes is an object": (changed("nodes", value={}), "expected a list"),
    "a node is a string": (changed("nodes", 1, value="g"), r"nodes\[1\]: expected an object"),
    "a node is null": (changed("nodes", 1, value=None), r"nodes\[1\]: expected an object"),
    "meta is a list": (changed("meta", value=[]), "'meta' is .*expected an object"),
    "name is a number": (changed("tensors", 0, "name", value=3), "'name' is 3; expected a string"),
    "name is empty": (changed("tensors", 0, "name", value=""), "empty name"),
    "no name": (without("nodes", 0, "name"), r"nodes\[0\]: field 'name' is missing"),
    "duplicate tensor": (changed("tensors", 1, "name", value="x"), "names must be unique"),
    "duplicate node": (changed("nodes", 1, "name", value="f"), "names must be unique"),
    "negative size": (changed("tensors", 1, "size_bytes", value=-1), "'size_bytes' is -1"),
    "size is a float": (changed("tensors", 1, "size_bytes", value=1.5), "'size_bytes' is 1.5"),
    "size is true": (changed("tensors", 1, "size_bytes", value=True), "'size_bytes' is True"),
    "size is a string": (changed("tensors", 1, "size_bytes", value="4GB"), "'size_bytes' is '4GB'"),
    "size is huge": (changed("tensors", 1, "size_bytes", value=10**30), "from 0 to"),
    "workspace is negative": (
        changed("nodes", 0, "workspace_bytes", value=-4),
        "'workspace_bytes' is -4",
    ),
    "workspace is huge": (changed("nodes", 0, "workspace_bytes", value=2**61), "from 0 to"),
    "time is negative": (changed("nodes", 0, "time_s", value=-1.0), "'time_s' is -1"),
    "time is NaN": (changed("nodes", 0, "time_s", value=float("nan")), "'time_s' is nan"),
    "time is infinite": (changed("nodes", 0, "time_s", value=float("inf")), "'time_s' is inf"),
    "time is a string": (changed("nodes", 0, "time_s", value="1"), "'time_s' is '1'"),
    "time is huge": (changed("nodes", 0, "time_s", value=10**400), "'time_s' is"),
    "unknown kind": (changed("tensors", 0, "kind", value="secret"), "'kind' is 'secret'"),
    "kind is a list": (changed("tensors", 0, "kind", value=["input"]), "'kind' is"),
    "unknown phase": (changed("nodes", 0, "phase", value="sideways"), "'phase' is 'sideways'"),
    "recomputable is a number": (changed("nodes", 0, "recomputable", value=1), "true or false"),
    "inputs is a string": (changed("nodes", 0, "inputs", value="x"), "'inputs' is 'x'"),
    "inputs holds a number": (
        changed("nodes", 0, "inputs", value=[1]),
        r"'inputs\[0\]' is 1; ",
    ),
    "workspace is misspelt": (
        changed("nodes", 0, "workspace", value=4),
        r"nodes\[0\]: field 'workspace' is unknown; did you mean 'workspace_bytes'",
    ),
    "alias is misspelt": (changed("tensors", 1, "alias", value="x"), "did you mean 'alias_of'"),
    "unknown input": (changed("nodes", 0, "inputs", value=["zz"]), "reads 'zz'"),
    "unknown output": (changed("nodes", 0, "outputs", value=["zz"]), "makes 'zz'"),
    "unknown graph output": (changed("outputs", value=["zz"]), "outputs names 'zz'"),
    "output twice": (changed("outputs", value=["grad", "grad"]), "twice"),
    "a cycle": (changed("nodes", 0, "inputs", value=["b"]), "without cycles"),
    "reads itself": (changed("nodes", 0, "inputs", value=["a"]), "without cycles"),
    "made twice": (changed("nodes", 1, "outputs", value=["a"]), "made twice"),
    "made twice by one": (changed("nodes", 1, "outputs", value=["b", "b"]), "made twice"),
    "alias of nothing": (changed("tensors", 1, "alias_of", value="zz"), "alias_of is 'zz'"),
    "alias of itself": (changed("tensors", 1, "alias_of", value="a"), "alias"),
    "alias is a number": (changed("tensors", 1, "alias_of", value=7), "'alias_of' is 7"),
    "backward before forward": (changed("nodes", 0, "phase", value="backward"), "the order is"),
    "truncated": (json.dumps(a_graph())[:200], "not valid JSON .*truncated"),
    "empty": ("", "not valid JSON"),
    "not JSON": ("import torch", "not valid JSON"),
    "deep": ("[" * 200_000, "nested too deeply|not valid JSON"),
    "deep object": ('{"meta":' * 200_000, "nested too deeply|not valid JSON"),
    "a number of many digits": ('{"format": ' + "9" * 10_000 + "}", "digits|expected"),
}


@pytest.mark.parametrize("case", HOSTILE_GRAPHS)
def test_a_hostile_graph_is_refused_by_field(case, tmp_path):
    content, reason = HOSTILE_GRAPHS[case]
    path = written(tmp_path, content)
    with pytest.raises(FormatError, match=reason) as raised:
        Graph.load(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 400


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(FormatError, match="not UTF-8"):
        Graph.load(path)


def test_extra_fields_of_later_versions_are_ignored(tmp_path):
    graph = a_graph() | {"colour": "blue"}
    graph["nodes"][0]["colour"] = "red"
    assert Graph.load(written(tmp_path, graph)) == Graph.from_json(a_graph())


@pytest.mark.slow
@pytest.mark.parametrize("field", ["nodes", "tensors"])
def test_ten_million_entries_are_refused_before_one_is_looked_at(field, tmp_path):
    path = tmp_path / "graph.json"
    whole = json.dumps({**a_graph(), field: []})
    path.write_text(whole.replace(f'"{field}": []', f'"{field}": [' + "0," * 10**7 + "0]"))
    with pytest.raises(FormatError, match=f"'{field}' is .*10000001 entries.*at most 2000000"):
        Graph.load(path)


@pytest.mark.slow
def test_ten_million_ops_are_refused_before_one_is_looked_at(tmp_path):
    path = tmp_path / "schedule.json"
    whole = json.dumps(a_schedule() | {"ops": []})
    path.write_text(whole.replace('"ops": []', '"ops": [' + "0," * 10**7 + "0]"))
    with pytest.raises(FormatError, match=r"'ops' is .*10000001 entries"):
        SavedSchedule.load(path)


def a_schedule() -> dict:
    return {
        "format": "schedule/1",
        "graph_id": Graph.from_json(a_graph()).graph_id,
        "method": "none",
        "status": "optimal",
        "budget_bytes": 1000,
        "peak_bytes": 224,
        "time_s": 4.0,
        "baseline_time_s": 4.0,
        "lower_bound_s": 4.0,
        "ops": [["compute", n] for n in ("f", "g", "loss", "back")],
    }


HOSTILE_SCHEDULES = {
    "a graph": (a_graph(), "this is a graph file; a schedule file is expected here"),
    "not an object": ([], "expected an object"),
    "no ops": ({"ops": None}, "'ops' is None"),
    "ops is an object": ({"ops": {}}, "'ops' is {}"),
    "an op is a string": ({"ops": ["f"]}, r"ops\[0\] is 'f'"),
    "an op is too long": ({"ops": [["compute", "f", "g"]]}, r"ops\[0\]"),
    "an op is empty": ({"ops": [[]]}, r"ops\[0\]"),
    "an unknown op": ({"ops": [["teleport", "f"]]}, r"ops\[0\].*expected \[\"compute\""),
    "an op names a number": ({"ops": [["compute", 3]]}, r"ops\[0\]"),
    "deep op": ({"ops": [[["compute", "f"]]]}, r"ops\[0\]"),
    "graph_id is a number": ({"graph_id": 3}, "'graph_id' is 3"),
    "budget is negative": ({"budget_bytes": -1}, "'budget_bytes' is -1"),
    "budget is a string": ({"budget_bytes": "1GB"}, "'budget_bytes' is '1GB'"),
    "peak is a float": ({"peak_bytes": 0.5}, "'peak_bytes' is 0.5"),
    "time is NaN": ({"time_s": float("nan")}, "'time_s' is nan"),
    "bound is infinite": ({"lower_bound_s": float("inf")}, "'lower_bound_s' is inf"),
    "unknown status": ({"status": "splendid"}, "'status' is 'splendid'"),
    "method is null": ({"method": None}, "'method' is None"),
    "request is a list": ({"request": []}, "'request' is"),
    "reserve is negative": ({"request": {"reserve_bytes": -1}}, "request.*'reserve_bytes'"),
    "reserve above budget": ({"request": {"reserve_bytes": 2000}}, "above budget_bytes"),
    "seed is a string": ({"request": {"seed": "x"}}, "request.*'seed'"),
    "an unknown word": ({"request": {"rewrites": "bits"}}, "request.*'rewrites' is 'bits'"),
    "environment is a string": ({"environment": "x"}, "'environment' is 'x'"),
    "rewrites before there were any": (
        {"rewrites": ["in_place"]},
        r"'rewrites' is \['in_place'\], which a file of an older .*expected 'format' 'schedule/2'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_SCHEDULES)
def test_a_hostile_schedule_is_refused_by_field(case, tmp_path):
    change, reason = HOSTILE_SCHEDULES[case]
    whole = isinstance(change, list) or "format" in change
    path = written(tmp_path, change if whole else a_schedule() | change)
    with pytest.raises(FormatError, match=reason) as raised:
        SavedSchedule.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("field", sorted(set(a_schedule()) - {"baseline_time_s"}))
def test_a_schedule_without_a_field_is_refused(field, tmp_path):
    schedule = a_schedule()
    del schedule[field]
    with pytest.raises(FormatError, match=f"'{field}' is missing"):
        SavedSchedule.load(written(tmp_path, schedule))


def test_a_schedule_is_simulated_again_when_it_is_read(tmp_path):
    graph = Graph.from_json(a_graph())
    path = written(tmp_path, a_schedule() | {"peak_bytes": 1, "time_s": 0.0})
    loaded = Solution.load(path, graph=graph)
    assert loaded.simulation.peak_bytes == 10 + 100 + 100 + 4 + 10
    assert loaded.simulation.time_s == 4.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"graph_id": "sha256:0"}, "another graph"),
        ({"ops": [["compute", "zz"]]}, "'zz', which is not a node"),
        ({"ops": [["free", "zz"]]}, "'zz', which is not a tensor"),
        ({"ops": [["free", "x"]]}, "is resident"),
        ({"ops": []}, "has never run"),
        ({"budget_bytes": 100}, "above the 100"),
        ({"ops": [["compute", "g"]]}, "runs for the first time before"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_refused(change, reason, tmp_path):
    path = written(tmp_path, a_schedule() | change)
    with pytest.raises(IllegalScheduleError, match=reason):
        Solution.load(path, graph=Graph.from_json(a_graph()))


def test_a_solution_comes_back_as_it_was(tmp_path):
    solution = solve(Graph.from_json(a_graph()), budget=1000, reserve=100, method="none", seed=3)
    solution.save(tmp_path / "schedule.json")
    loaded = Solution.load(tmp_path / "schedule.json", graph=solution.graph)
    assert loaded.schedule == solution.schedule
    assert loaded.simulation == solution.simulation
    assert loaded.request == solution.request
    assert loaded.status == solution.status
    saved = json.loads((tmp_path / "schedule.json").read_text())
    assert saved["ops"][0] == ["compute", "f"]
    assert {type(op) for op in loaded.schedule.ops} <= {Compute, Free}


def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"time_s": float("nan")})
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file.json"]


def test_nothing_is_half_written(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    path.write_text("before")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file.json"]


def test_permissions_are_those_that_people_expect(tmp_path):
    path = tmp_path / "file.json"
    mask = os.umask(0o022)
    try:
        write_whole(path, b"{}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        path.chmod(0o600)
        write_whole(path, b"[]")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(mask)


@pytest.mark.parametrize("n_bytes", [MAX_FILE_BYTES + 1, 2**37])  # the latter is above memory
def test_a_file_too_large_to_parse_safely_is_refused_unread(n_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(n_bytes)  # a hole: takes no disk
    with pytest.raises(FormatError, match=r"files above .* are refused"):
        Graph.load(path)


def test_the_metadata_of_a_file_is_written_back_unchanged():
    meta = {
        "mine": [1, {"a": None}],
        "costs": "by hand",
        "environment": 5,  # of another type than the field's: kept, and not read
        "in_place": ["a", 1],
        "model": "mine",
        "buffers": {},
    }
    value = {**a_graph(), "meta": meta}
    graph = Graph.from_json(value)
    assert graph.meta.costs == "by hand"
    assert graph.meta.environment == {}
    assert graph.meta.eager_overwrites == ()
    assert graph.meta.extra == {"mine": meta["mine"], "environment": 5, "in_place": ["a", 1]}
    assert json.dumps(graph.to_json()["meta"]) == json.dumps(meta)
    assert graph.meta.with_environment(loss="outside").to_json() == {
        **meta,
        "environment": {"loss": "outside"},
    }
