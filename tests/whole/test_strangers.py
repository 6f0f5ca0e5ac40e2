"""Files of strangers: each is refused with a typed error, or can be written, shown and planned.

Fifty thousand mutations of a graph file, and of a schedule file, seeded; a sample of what is read
goes through the command.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import Exit, main
from graphs.files import FormatError
from graphs.graph import Graph, GraphError
from solver import solve
from solver.schedule.simulator import IllegalScheduleError
from solver.schedule.solution import SavedSchedule, Solution
from tests.support.budgets import baseline_peak_bytes
from tests.support.damaged_json import damaged
from tests.support.paths import DATA

STEP = DATA / "small_step.json"
"""A traced step of 18 nodes, with all that `trace` writes into `meta`."""
CHUNK = 500
PAGE = ("--report", "page.html", "--plot", "plot.svg")
WAYS = ((), ("--json",), ("--method", "ilp"), ("--compare",), ("--emit", "megatron"))


def read_graph(path: Path) -> Graph | None:
    """The graph, which comes back as it was; None: refused."""
    try:
        graph = Graph.load(path)
    except (FormatError, GraphError):
        return None
    written = path.with_name("again.json")
    graph.save(written)
    again = Graph.load(written)
    assert again == graph
    assert again.meta == graph.meta
    assert again.graph_id == graph.graph_id
    return graph


@pytest.mark.slow(keep=100)  # all
@pytest.mark.parametrize("seed", range(0, 50_000, CHUNK))
def test_graphs(
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path, good = tmp_path / "graph.json", STEP.read_text()
    survivors = []
    for i in range(seed, seed + CHUNK):
        path.write_bytes(damaged(good, random.Random(i)))
        graph = read_graph(path)
        if graph is not None:
            survivors.append((path.read_bytes(), graph))
    assert 0.2 * CHUNK < len(survivors) < 0.6 * CHUNK
    rng = random.Random(seed)
    options = PAGE if seed % (20 * CHUNK) == CHUNK else rng.choice(WAYS)
    content, graph = rng.choice(survivors)
    path.write_bytes(content)
    budget = f"{min(2**60, max(1, int(rng.choice((0.5, 0.9, 1.0)) * baseline_peak_bytes(graph))))}B"
    code = main(["graph.json", "--budget", budget, "-o", "schedule.json", *options])
    emits_nothing = code == Exit.USAGE and "--emit" in options
    assert code in (Exit.SOLVED, Exit.INFEASIBLE) or emits_nothing
    if code == Exit.SOLVED:
        assert main(["explain", "schedule.json", "graph.json"]) == Exit.SOLVED
    capsys.readouterr()


@pytest.mark.slow(sample=1, keep=100)  # all
@pytest.mark.parametrize("seed", range(0, 50_000, CHUNK))
def test_schedules(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph.load(STEP)
    path = tmp_path / "schedule.json"
    solve(graph, budget=baseline_peak_bytes(graph)).save(path)
    good = path.read_text()
    survivors = []
    for i in range(seed, seed + CHUNK):
        path.write_bytes(damaged(good, random.Random(i)))
        try:
            solution = Solution.load(path, graph=graph)
        except (FormatError, IllegalScheduleError):
            continue
        survivors.append(path.read_bytes())
        written = tmp_path / "again.json"
        solution.save(written)
        assert Solution.load(written, graph=graph) == solution
        assert repr(solution)
    assert 0.05 * CHUNK < len(survivors) < 0.6 * CHUNK
    path.write_bytes(random.Random(seed).choice(survivors))
    assert main(["explain", str(path), str(STEP)]) == Exit.SOLVED
    capsys.readouterr()


STRANGE = {
    "half a surrogate pair": (("nodes", 0, "module"), "\ud800", r"nodes\[0\]: field 'module'"),
    "in a list": (("outputs", 0), "\udfff", r"field 'outputs\[0\]' is '\\udfff'"),
    "in meta": (("meta", "model"), "\ud800", r"meta\.model is '\\ud800'; expected a string in"),
    "NaN": (("meta", "environment", "x"), float("nan"), r"meta\.environment\.x is nan; expected a"),
    "infinity": (("meta", "costs", "x"), [1e999], r"meta\.costs\.x\[0\] is inf; expected a"),
    "huge": (("meta", "parameter_bytes", "x"), 10**400, r"meta\.parameter_bytes\.x is 1000"),
    "size": (("tensors", 0, "size_bytes"), 10**400, r"tensors\[0\]: field 'size_bytes' is 1000"),
    "time": (("nodes", 0, "time_s"), 1e300, "time_s is 1e.300; it must be from 0 to 1e12"),
    "sum": (("tensors", slice(0, 4), "size_bytes"), 2**60, "take .* bytes; at most 2..61"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_the_error_names_the_place(case: str, tmp_path: Path) -> None:
    (first, *path), odd, message = STRANGE[case]
    value = json.loads(STEP.read_text())
    places = [value[first]]
    for key in path[:-1]:
        places = places[0][key] if isinstance(key, slice) else [places[0][key]]
    for place in places:
        place[path[-1]] = odd
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(value))
    with pytest.raises(FormatError, match=message):
        Graph.load(file)


def test_what_was_nested_too_deeply_could_not_be_written(tmp_path: Path) -> None:
    deep: object = []
    for _ in range(60):
        deep = [deep]
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({**json.loads(STEP.read_text()), "meta": {"x": deep}}))
    with pytest.raises(FormatError, match=r"meta\.x(\[0\])+: nested too deeply"):
        Graph.load(file)


def test_a_huge_budget_in_a_schedule_is_refused(tmp_path: Path) -> None:
    graph = Graph.load(STEP)
    file = tmp_path / "schedule.json"
    solve(graph, budget=baseline_peak_bytes(graph)).save(file)
    value = json.loads(file.read_text())
    file.write_text(json.dumps({**value, "budget_bytes": 10**400}))
    with pytest.raises(FormatError, match=r"'budget_bytes' is 1000.*expected an integer from 0 to"):
        SavedSchedule.load(file)
