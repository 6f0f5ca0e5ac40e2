"""The snapshot for memory_viz: the simulator's bytes, in the form that PyTorch's own tools read."""

from __future__ import annotations

import dataclasses
import pickle
import pickletools

import pytest

from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.reporting.snapshot import snapshot, write_snapshot
from solver.schedule import Solution
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.overwriting import with_overwrites
from tests.support.paths import GPT2

NET = residual(n_blocks=8)
PEAK_BYTES = baseline_peak_bytes(NET)


def plans() -> dict[str, Solution]:
    budget = int(0.75 * PEAK_BYTES)
    gpt2 = with_overwrites(Graph.load(GPT2))
    return {
        "recomputed": solve(NET, budget=budget, method="sqrt"),
        "copied": solve(NET, budget=budget, host_budget="64TB", host_link="1TB/s"),
        "overwritten": solve(gpt2, budget="4GB", method="sqrt"),
        "in flight": solve(dataclasses.replace(NET, n_in_flight=3), budget="1GB", method="none"),
        "kept": solve(NET, budget=PEAK_BYTES, method="none"),
    }


PLANS = plans()


def replayed(value: dict) -> tuple[int, dict[int, int]]:
    """The most that is allocated at once, and what is allocated at the end, by address."""
    (segment,) = value["segments"]
    live: dict[int, int] = {}
    most = now = 0
    for entry in value["device_traces"][0]:
        address, size = entry.get("addr"), entry["size"]
        if entry["action"] == "alloc":
            assert size > 0
            assert segment["address"] <= address
            assert address + size <= segment["address"] + segment["total_size"]
            live[address] = size
            now += size
            starts = sorted(live)
            index = starts.index(address)
            if index:
                assert starts[index - 1] + live[starts[index - 1]] <= address
            if index + 1 < len(starts):
                assert address + size <= starts[index + 1]
            most = max(most, now)
        elif entry["action"] == "free_completed":
            assert live.pop(address) == size
            now -= size
    return most, live


@pytest.mark.parametrize("name", PLANS)
def test_the_most_at_once_is_the_predicted_peak(name) -> None:
    solution = PLANS[name]
    value = snapshot(solution)
    most, live = replayed(value)
    assert most == solution.simulation.peak_bytes
    assert sum(live.values()) == solution.simulation.live_bytes[-1]
    (segment,) = value["segments"]
    active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert active == live
    at = segment["address"]
    for block in segment["blocks"]:  # the viewer adds sizes up to addresses
        assert block["address"] == at
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]


@pytest.mark.parametrize("name", PLANS)
def test_every_op_is_named_where_it_allocates(name) -> None:
    solution = PLANS[name]
    entries = snapshot(solution)["device_traces"][0]
    texts = {f["name"] for e in entries if e["action"] == "alloc" for f in e["frames"]}
    graph = solution.graph
    made = {graph.root(n) for node in graph.nodes for n in node.outputs}
    sized = {n for n in made if graph.tensor_by_name[n].size_bytes and n in graph.producer}
    assert sized <= texts
    assert any(text.startswith("fetch ") for text in texts) == (name == "copied")


def test_of_the_baseline() -> None:
    most, _ = replayed(snapshot(PLANS["recomputed"], without_plan=True))
    assert most == PEAK_BYTES
    nothing = solve(NET, budget=int(0.75 * PEAK_BYTES), method="none")
    assert replayed(snapshot(nothing, without_plan=True))[0] == PEAK_BYTES
    with pytest.raises(ValueError, match="no schedule to write"):
        snapshot(nothing)


def test_the_viewer_can_unpickle_it(tmp_path) -> None:
    """torch/utils/viz/MemoryViz.js reads protocols 2 to 4 and these operations."""
    known = {"PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"}
    known |= {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
    known |= {"BININT", "BININT1", "BININT2", "LONG1", "BINGET", "LONG_BINGET", "NONE"}
    known |= {"SHORT_BINUNICODE", "BINUNICODE"}
    for name, solution in PLANS.items():
        write_snapshot(solution, tmp_path / name)
        found = list(pickletools.genops((tmp_path / name).read_bytes()))
        assert {operation.name for operation, _, _ in found} <= known
        assert found[0][1] <= 4
        assert pickle.loads((tmp_path / name).read_bytes()) == snapshot(solution)


@pytest.mark.parametrize("name", PLANS)
def test_torch_reads_it(name) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    value = snapshot(PLANS[name])
    n_bytes = sum(
        b["size"] for b in value["segments"][0]["blocks"] if b["state"] == "active_allocated"
    )
    assert viz.trace(value).count(" = seg_0[") + viz.trace(value).count(" = a[") > 0
    assert f"total_allocated: {viz.Bytes(n_bytes)}" in viz.segsum(value)
    lines = viz.memory(value, format_flamegraph=lambda text: text).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == value["segments"][0]["total_size"]
    assert viz.segments(value, format_flamegraph=lambda text: text)
    for drawn in (viz.trace_plot(value), viz.segment_plot(value)):
        assert "snapshot.pickle" in drawn
    pairs = viz.filter_alloc_free_pairs(snapshot(PLANS[name]))
    left = [e for e in pairs["device_traces"][0] if e["action"] == "alloc"]
    assert sum(entry["size"] for entry in left) == n_bytes


def test_the_command_writes_it(tmp_path, capsys) -> None:
    NET.save(tmp_path / "graph.json")
    out = tmp_path / "plan.pickle"
    options = ["--budget", str(int(0.75 * PEAK_BYTES)), "--method", "sqrt"]
    assert main([*options, "--snapshot", str(out), str(tmp_path / "graph.json")]) == 0
    assert "".join(capsys.readouterr().out.split()).count(str(out)) == 1
    assert pickle.loads(out.read_bytes()) == snapshot(PLANS["recomputed"])
    out.unlink()
    options[-1] = "none"
    assert main([*options, "--snapshot", str(out), str(tmp_path / "graph.json")]) == 3
    assert not out.exists()
