"""The report: every figure is the simulator's, at any width, with and without a schedule."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from graphs.graph import Graph, Tensor
from graphs.synthetic.nets import chain, residual
from solver.methods.registry import METHODS
from solver.plan_analysis.advice import Advice
from solver.reporting import Verification, rows
from solver.reporting.memory_rows import dtype_table, memory_table
from solver.reporting.report_data import Report, best, rewritten, step_notes, to_json
from solver.reporting.terminal import show
from solver.schedule.memory import CATEGORIES, memory_at, node_at
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.schedule.solution import Solution
from solver.sizes_deadlines_progress import format_size
from solver.sizes_deadlines_progress.format import describe_op
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.overwriting import with_overwrites
from tests.support.paths import GPT2
from tests.support.small_graphs import make, op


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return Graph.load(GPT2)


@pytest.fixture(scope="module")
def planned(gpt2) -> Solution:
    return solve(gpt2, budget="4GB", method="every_block")


def shown(report: Report, *, width: int = 80, **console: object) -> str:
    text = io.StringIO()
    show(report, Console(file=text, width=width, highlight=False, **console))
    return text.getvalue()


def report_of(*solutions: Solution, **fields: object) -> Report:
    return Report(
        problem="model.py", device="a card", costs="roofline", solutions=solutions, **fields
    )


def verified() -> Verification:
    return Verification(
        device="the CPU",
        available_bytes=4 * 10**9,
        predicted_peak_bytes=3_100_000_000,
        measured_peak_bytes=3_200_000_000,
        baseline_predicted_peak_bytes=5_200_000_000,
        baseline_measured_peak_bytes=5_300_000_000,
        predicted_time_s=1.0,
        times_s=(1.5,),
        baseline_predicted_time_s=0.9,
        baseline_times_s=(1.25,),
        n_gradients=149,
        differences=(),
        reserved_bytes=3_500_000_000,
    )


# The breakdown.


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    "graph",
    [chain(n_blocks=5), residual(n_blocks=4), Graph.load(GPT2)],
    ids=["chain", "res", "gpt"],
)
def test_the_parts_add_up_to_the_simulated_bytes_at_every_op(graph):
    budget_bytes = int(0.85 * baseline_peak_bytes(graph))
    schedules = [baseline(graph)]
    found = solve(graph, budget=budget_bytes, method="sqrt").schedule
    if found is not None:
        schedules.append(found)
    for schedule in schedules:
        simulation = simulate(graph, schedule)
        for position in range(0, len(schedule.ops), 1 + len(schedule.ops) // 200):
            parts = memory_at(graph, schedule, position)
            assert tuple(parts) == CATEGORIES
            assert sum(parts.values()) == simulation.live_bytes[position]
        assert sum(memory_at(graph, schedule, simulation.peak_op).values()) == simulation.peak_bytes


def test_each_kind_is_told_apart():
    graph = make(
        [
            op("f", "x w buf", "a"),
            op("back", "a w state", "g", phase="backward", workspace_bytes=5),
        ],
        {"x": 1, "w": 20, "buf": 300, "state": 4000, "a": 100, "g": 7},
        outputs="g",
    )
    kinds = {"x": "input", "w": "parameter", "buf": "buffer", "state": "optimizer_state"}
    graph = dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(t, kind={**kinds, "g": "gradient"}.get(t.name, t.kind))
            for t in graph.tensors
        ),
    )
    schedule = baseline(graph)
    position = simulate(graph, schedule).peak_op
    assert memory_at(graph, schedule, position) == {
        "parameters": 20,
        "gradients": 7,
        "optimizer": 4000,
        "buffers": 300,
        "batch": 1,
        "activations": 100,
        "workspace": 5,
    }


def test_before_the_first_op_only_what_is_resident_counts(gpt2):
    assert sum(memory_at(gpt2, baseline(gpt2), None).values()) == gpt2.resident_bytes


def test_the_op_of_the_peak(gpt2):
    node = node_at(gpt2, baseline(gpt2), simulate(gpt2, baseline(gpt2)))
    assert describe_op(node) == (
        "_log_softmax_backward_data (aten._log_softmax_backward_data.default, backward)"
    )
    assert describe_op(dataclasses.replace(node, module="head")).endswith("in head")
    assert "resident" in describe_op(None)


# The answer.


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_cut_off(planned, width):
    path = Path("/some/where/" + "long/" * 30 + "schedule.json")
    text = shown(report_of(planned, files=(("schedule", path),)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert str(path) in "".join(line.strip() for line in text.splitlines())
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("width", [60, 72, 80, 120])
def test_a_comparison_cuts_no_name_and_no_figure(planned, width):
    simulation = dataclasses.replace(planned.simulation, peak_bytes=999_900_000, n_recomputed=12345)
    wide = dataclasses.replace(
        planned, status="infeasible", simulation=simulation, solve_time_s=612.0, lower_bound_s=1.0
    )
    text = shown(report_of(wide, planned, refused=(("revolve", "unequal"),)), width=width)
    rows = text[text.index("Methods") : text.index("Answer")].splitlines()[1:]
    assert "…" not in text
    assert max(map(len, rows)) <= width
    assert [row.split()[0] for row in rows if row[2:3].strip()] == [
        "method",
        "every_block",
        "every_block",
        "revolve",
    ]
    if width >= 80:  # a row for each method, and two lines of titles at most
        assert any("999.9 MB" in row and "612 s" in row for row in rows)


def test_the_answer_says_all_there_is_to_say(planned):
    text = shown(report_of(planned))
    for words in (
        "Answer  feasible",
        "every_block",
        "3.12 GB (2.91 GiB)",
        "+13.65 %",
        "lower bound",
        "gap",
        f"recomputed ops      {planned.simulation.n_recomputed}",
        "save it with -o schedule.json",
    ):
        assert words in text


def test_a_reserve_is_told_with_its_reason(gpt2):
    solution = solve(gpt2, budget="7GB", reserve="1GB", method="none")
    text = shown(report_of(solution, reserve_reason="for the context"))
    assert "1.00 GB (953.67 MiB) (for the context)" in text
    assert "available           6.00 GB" in text


def test_a_step_that_needs_no_plan_says_so(gpt2, planned):
    text = shown(report_of(solve(gpt2, budget=baseline_peak_bytes(gpt2), method="none")))
    assert "0; the step fits without a plan" in text
    assert "fits without a plan" not in shown(report_of(planned))


def test_a_plan_that_recomputes_nothing_has_one_column(gpt2):
    text = shown(report_of(solve(gpt2, budget="6GB", method="none")))
    assert "peak op (baseline)" in text
    assert "peak op (plan)" not in text


def test_the_best_of_several_is_the_fastest_that_fits(gpt2):
    solutions = [solve(gpt2, budget="4GB", method=name) for name in ("none", "every_block", "sqrt")]
    assert best(solutions).method == "sqrt"
    assert best(solutions[:2]).method == "every_block"
    assert best(solutions[:1]).method == "none"
    text = shown(report_of(*solutions))
    assert "Methods" in text
    assert text.count("every_block") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_advice_is_told(planned):
    advice = (Advice("logits", "Chunk the loss. " * 9), Advice("precision", "Use bf16."))
    for width in (60, 80):
        text = shown(report_of(planned, advice=advice), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert " ".join(text[text.index("Advice") :].split()).startswith(
            "Advice logits Chunk the loss. Chunk the loss."
        )
        assert "precision           Use bf16." in text
    assert to_json(report_of(planned, advice=advice))["advice"][1] == {
        "kind": "precision",
        "text": "Use bf16.",
    }
    assert "Advice" not in shown(report_of(planned))


def test_what_was_rewritten_is_told_beside_the_plain_step(gpt2, planned):
    meta = dataclasses.replace(gpt2.meta, rewrites=["in_place"])
    in_place = dataclasses.replace(with_overwrites(gpt2), meta=meta)
    n_in_place = sum(node.overwrites is not None for node in in_place.nodes)
    peak_bytes = baseline_peak_bytes(in_place)
    solution = solve(in_place, budget=peak_bytes)
    assert solution.baseline == planned.baseline  # overhead and savings are against the plain step
    assert solution.simulation.peak_bytes == peak_bytes < planned.baseline.peak_bytes
    text = " ".join(shown(report_of(solution)).split())
    saved = f"{format_size(peak_bytes)} instead of {format_size(planned.baseline.peak_bytes)}"
    assert (
        f"rewrites {n_in_place} outputs in place of inputs: without recomputation {saved}" in text
    )
    assert "+0.00 % time; bitwise identical results" in text
    found = to_json(report_of(solution))["rewrites"]
    assert found["n_in_place"] == n_in_place > 0
    assert found["results"] == "bitwise"
    assert to_json(report_of(planned))["rewrites"] is None
    assert " rewrites " not in shown(report_of(planned))


def test_rewrites_that_leave_the_peak_say_what_they_save(gpt2, monkeypatch):
    meta = dataclasses.replace(gpt2.meta, rewrites=["in_place"])
    solution = solve(dataclasses.replace(with_overwrites(gpt2), meta=meta), budget="1TB")
    found = rewritten(solution)
    same = dataclasses.replace(found, plain_bytes=found.peak_bytes)
    monkeypatch.setattr(rows, "rewritten", lambda _: same)
    text = " ".join(shown(report_of(solution)).split())
    assert "in place of inputs: without recomputation the same peak (they save memory at" in text


def test_what_buffers_count_besides_those_of_the_module_is_below_them(gpt2):
    state = Tensor("random_state", 5_056, "buffer")
    meta = dataclasses.replace(gpt2.meta, parameters={"w": gpt2.resident[0].name})
    graph = dataclasses.replace(gpt2, tensors=(*gpt2.tensors, state), meta=meta)
    table = memory_table(solve(graph, budget="1TB"))
    names = [row[0] for row in table.rows]
    assert names.index("  (random state)") == names.index("buffers") + 1
    assert table.rows[names.index("  (random state)")][1] == "5.06 KB"
    assert table.rows[table.bold][0] == "peak"


def test_a_refusal_is_told(gpt2, planned):
    text = shown(report_of(planned, refused=(("ilp", "364 ops are too many"),)))
    assert "refused" in text
    assert "Refused by ilp: 364 ops are too many" in text


def nothing_found(gpt2: Graph, **changes: object) -> Solution:
    solution = solve(gpt2, budget="4GB", method="none")
    return dataclasses.replace(solution, **changes)


def test_colour_is_for_terminals_that_want_it(planned, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;36mfeasible" in shown(
        report_of(planned), force_terminal=True, color_system="256"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;36m" not in shown(report_of(planned), force_terminal=True)
    assert "\x1b" not in shown(report_of(planned))


# The object of --json.


def test_the_object_is_json_whatever_was_found(gpt2, planned):
    for solution in (planned, nothing_found(gpt2, lower_bound_s=math.inf)):
        report = report_of(solution, notes=("a note",), files=(("schedule", Path("s.json")),))
        value = json.loads(json.dumps(to_json(report), allow_nan=False))
        assert value["format"] == "report/1"
        assert value["graph_id"] == gpt2.graph_id
        assert value["notes"] == ["a note"]
        assert value["files"] == {"schedule": "s.json"}
        assert [m["method"] for m in value["methods"]] == [solution.method]
    assert value["lower_bound_s"] is None


def test_every_method_can_be_reported():
    graph = residual(n_blocks=3)
    peak_bytes = baseline_peak_bytes(graph)
    names = [name for name, method in METHODS.items() if not method.needs_places]
    solutions = [solve(graph, budget=peak_bytes, method=name, time_limit_s=600) for name in names]
    text = shown(report_of(*solutions))
    assert all(name in text for name in names)
    json.dumps(to_json(report_of(*solutions)), allow_nan=False)


# Activations by dtype.


def by_dtype(shares: dict[str, float]) -> Solution:
    """A plan of a graph whose storages are of these dtypes, by their share of the bytes."""
    graph = residual(n_blocks=4)
    made = sorted(
        (t for t in graph.tensors if t.name in graph.producer), key=lambda t: t.size_bytes
    )
    total = sum(tensor.size_bytes for tensor in made)
    dtypes: dict[str, list[str]] = {name: [] for name in shares}
    passed = 0
    for tensor in made:
        ends = ((name, sum(list(shares.values())[: i + 1])) for i, name in enumerate(shares))
        name = next(name for name, end in ends if passed <= end * total)
        dtypes[name].append(tensor.name)
        passed += tensor.size_bytes
    graph = dataclasses.replace(graph, meta={"dtypes": dtypes})
    return solve(graph, budget=int(0.8 * baseline_peak_bytes(graph)), method="sqrt")


def test_dtypes_add_up_to_the_activations_of_the_table():
    solution = by_dtype({"int64": 0.3, "bfloat16": 0.7})
    table = dtype_table(solution)
    activations = next(row for row in memory_table(solution).rows if row[0] == "activations")
    assert (table.rows[-1][1], table.rows[-1][3]) == (activations[1], activations[3])
    for run in solution.peaks:
        assert sum(run.activations_of.values()) == run.bytes_of["activations"]
    text = shown(report_of(solution))
    assert "Activations at the peak by dtype" in text
    found = to_json(report_of(solution))
    for run in (found["baseline"], found["schedule"]):
        in_all = run["memory_bytes"]["activations"]
        assert sum(run["activation_bytes_by_dtype"].values()) == in_all


def test_a_dtype_that_hardly_counts_is_for_the_page_alone():
    solution = by_dtype({"int64": 1e-6, "float32": 1.0})
    assert dtype_table(solution) is not None
    assert "by dtype" not in shown(report_of(solution))
    plain = solve(residual(n_blocks=4), budget="1GB", method="none")
    assert dtype_table(plain) is None


def test_a_rank_of_tensor_parallelism_is_said_to_be_one() -> None:
    def of(kind: str) -> str:
        nodes = [op("f", "x", "a"), op("g", "a", "b"), op("h", "b", "c", phase="backward")]
        graph = make(nodes, {"x": 1, "a": 1, "b": 1, "c": 1}, outputs="c")
        named = [dataclasses.replace(n, op=kind, time_s=0.5) for n in graph.nodes[:2]]
        nodes = (*named, *graph.nodes[2:])
        return " ".join(step_notes(dataclasses.replace(graph, nodes=nodes)))

    told = of("_c10d_functional.all_reduce.default")
    assert "All figures are of one rank of tensor parallelism." in told
    assert "waits 1.00 s for 2 collectives" in told
    assert "rank" not in of("aten.add.Tensor")
