"""The largest batch: the search against a scan of all sizes, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
import math
import signal

import pytest

import solver.plan_analysis.largest_batch
from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.plan_analysis.largest_batch import (
    SameStepError,
    SizeNotTraceableError,
    SizeSearch,
    largest,
)
from solver.reporting import plot
from solver.reporting.report_data import Report, to_json
from solver.reporting.size_rows import _rate, saturation_text, size_rows
from solver.schedule.solution import Request, Solution
from solver.sizes_deadlines_progress.deadline import ctrl_c_ends_searches
from solver.solving import attempt
from tests.support.budgets import baseline_peak_bytes

ONE = residual(n_blocks=4)


def batch_of(n: int) -> Graph:
    """The step for n samples: activations and times grow with n, and a fixed second is lost."""
    fixed = set(ONE.resident)
    tensors = tuple(
        t if t in fixed else dataclasses.replace(t, size_bytes=n * t.size_bytes)
        for t in ONE.tensors
    )
    nodes = tuple(dataclasses.replace(node, time_s=1.0 + n * node.time_s) for node in ONE.nodes)
    return dataclasses.replace(ONE, tensors=tensors, nodes=nodes)


def peak_bytes(n: int) -> int:
    return baseline_peak_bytes(batch_of(n))


def planner(budget_bytes: int, *, method: str = "every_block", asked: list[int] | None = None):
    def plan(n: int) -> Solution:
        if asked is not None:
            asked.append(n)
        request = Request(budget_bytes=budget_bytes, method=method, time_limit_s=600)
        return attempt(batch_of(n), request)

    return plan


@pytest.mark.slow(sample=1, keep=6)
@pytest.mark.parametrize("shown", [3, 10, 13])
@pytest.mark.parametrize("first", [1, 3, 16, 50])
@pytest.mark.parametrize("method", ["none", "every_block"])
def test_it_finds_what_a_scan_of_all_sizes_finds(shown, first, method):
    plan = planner(peak_bytes(shown), method=method)
    fits = [n for n in range(1, 40) if plan(n).schedule is not None]
    assert fits == list(range(1, fits[-1] + 1))  # what the search assumes
    asked: list[int] = []
    found = largest(planner(peak_bytes(shown), method=method, asked=asked), first=first)
    assert found.largest.size == fits[-1] >= shown
    assert found.beyond.size == fits[-1] + 1
    assert len(set(asked)) == len(asked) <= 14  # none twice
    assert [c.size for c in found.candidates] == sorted(asked)


def plans_on_a_line(sizes: list[int]):
    """Of no schedule but the baseline, whose peak is what each op needs; up to 1000 fit."""
    step = dataclasses.replace(
        ONE, nodes=tuple(dataclasses.replace(node, recomputable=False) for node in ONE.nodes)
    )

    def plan(n: int) -> Solution:
        sizes.append(n)
        return attempt(
            dataclasses.replace(step, tensors=batch_of(n).tensors),
            Request(budget_bytes=peak_bytes(1000), method="none", time_limit_s=600),
        )

    return plan


def test_bytes_that_grow_by_a_line_are_not_bisected():
    sizes: list[int] = []
    found = largest(plans_on_a_line(sizes))
    assert found.largest.size == 1000
    assert sizes == [1, 4, 16, 64, 256, 1000, 1001]


@pytest.mark.parametrize(("short", "n_tried"), [(1, 7), (6, 11)])
def test_near_a_line_that_promises_a_little_too_much_the_search_goes_down(
    monkeypatch: pytest.MonkeyPatch, short: int, n_tried: int
):
    """What no line has, such as what a tensor is recomputed from, leaves the answer just below."""
    promised = solver.plan_analysis.largest_batch._expected_largest
    monkeypatch.setattr(
        solver.plan_analysis.largest_batch,
        "_expected_largest",
        lambda candidates: (at := promised(candidates)) and at + short,
    )
    sizes: list[int] = []
    found = largest(plans_on_a_line(sizes))
    assert (found.largest.size, found.beyond.size) == (1000, 1001)
    assert len(sizes) == len({*sizes}) == n_tried, sizes


def test_nothing_fits():
    found = largest(planner(10), first=6)
    assert found.largest is None
    assert found.saturation is None
    assert [c.size for c in found.candidates] == [1, 3, 6]
    assert found.beyond.size == 1


def test_it_stops_growing(monkeypatch):
    monkeypatch.setattr(solver.plan_analysis.largest_batch, "MAX_SIZE", 16)
    found = largest(planner(2**50))
    assert found.largest.size == 16
    assert found.beyond is None


@pytest.mark.slow
def test_a_length_is_found_to_a_64th():
    """Beyond 128 the last steps of the bisection are left out."""
    plan = planner(peak_bytes(1000), method="none")
    exact = largest(plan, first=128)
    rough = largest(plan, size="seq_length")
    assert exact.largest.size == 1000
    assert 1000 * (1 - 1 / 64) <= rough.largest.size <= 1000
    assert len(rough.candidates) < len(exact.candidates)


def test_a_size_that_changes_nothing_is_refused():
    with pytest.raises(SameStepError, match="sizes 1 and 4 give the same step"):
        largest(lambda n: planner(2**50)(5))


def test_a_size_that_cannot_be_made_counts_as_one_that_does_not_fit():
    def plan(n: int) -> Solution:
        if n > 6:
            raise SizeNotTraceableError(f"{n} is too long")
        return planner(2**50)(n)

    found = largest(plan)
    assert found.largest.size == 6
    assert found.refused[0] == (7, "7 is too long")
    assert all(size > 6 for size, _ in found.refused)
    assert found.beyond is None


@pytest.mark.slow
def test_where_more_stops_paying():
    """Below the budget each sample amortises the fixed time; above it recomputation costs more."""
    found = largest(planner(peak_bytes(6), method="auto"))
    rates = {c.size: c.rate_per_s for c in found.candidates if c.rate_per_s is not None}
    best = max(rates.values())
    assert found.saturation.size == min(n for n, rate in rates.items() if rate >= 0.99 * best)
    size, solution = found.largest.size, found.largest.solution
    growing, ended = (
        found.with_solution(size, dataclasses.replace(solution, simulation=simulation))
        for simulation in (
            dataclasses.replace(solution.simulation, time_s=share * solution.simulation.time_s)
            for share in (0.01, 100)
        )
    )
    words = f"highest at batch {size}, the largest"
    assert dict(size_rows(growing))["throughput"].startswith(words)
    assert ended.saturation.size < size
    assert saturation_text(ended) == f"saturates at batch {ended.saturation.size}"
    some = found.candidates[0]
    assert some.rate_per_s == pytest.approx(1 / sum(node.time_s for node in batch_of(1).nodes))


def test_ctrl_c_gives_the_largest_so_far():
    def plan(n: int) -> Solution:
        if n > 4:
            raise KeyboardInterrupt
        return planner(2**50)(n)

    found = largest(plan)
    assert found.interrupted
    assert found.largest.size == 4

    def plan_with_one_more(n: int) -> Solution:
        found = planner(2**50)(n)
        if n > 4:
            signal.raise_signal(signal.SIGINT)
        return found

    with ctrl_c_ends_searches():
        found = largest(plan_with_one_more)
    assert found.interrupted
    assert found.largest.size == 16

    def never(n: int) -> Solution:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        largest(never)


@pytest.mark.slow
def test_the_picture_shows_every_size_that_has_a_plan():
    found = largest(planner(peak_bytes(6), method="auto"))
    axes = plot.throughput(found)
    rates = {c.size: c.rate_per_s for c in found.candidates if c.rate_per_s is not None}
    line = axes.lines[0]
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == rates
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "without recomputation" in labels
    assert "with recomputation" in labels
    assert f"throughput {saturation_text(found)}" in labels
    assert not found.beyond.solution.proven_infeasible  # in `test_why_the_next_size_...`, it is
    assert f"from {found.beyond.size} on auto found none" in labels
    nothing = SizeSearch("batch_size", found.candidates[-1:])
    assert len(plot.throughput(nothing).lines[0].get_xdata()) == 0


def test_sizes_that_were_not_tried_are_told():
    found = largest(planner(peak_bytes(6), method="none"))
    fitting = (c for c in found.candidates if c.solution.schedule is not None)
    far = SizeSearch("batch_size", (*fitting, dataclasses.replace(found.beyond, size=99)))
    for search, has_gap in ((found, False), (far, True)):
        row = dict(size_rows(search))["largest"]
        assert row.endswith("found none. Sizes in between were not tried") == has_gap


def test_why_the_next_size_has_no_plan_is_told_apart():
    found = largest(planner(peak_bytes(6), method="none"))
    beyond = found.beyond.solution
    cases = {
        "it is proven that no plan fits": {"lower_bound_s": math.inf},
        "none was found within the time limit": {"lower_bound_s": 1.0, "status": "time_limit"},
        "none found none": {"lower_bound_s": 1.0, "status": "infeasible"},
    }
    for words, changes in cases.items():
        other = dataclasses.replace(beyond, obstacle=None, **changes)
        search = found.with_solution(7, other)
        labels = [t.get_text() for t in plot.throughput(search).get_legend().get_texts()]
        assert f"from 7 on {words}" in labels
        assert dict(size_rows(search))["largest"] == f"6; for 7 {words}"


def test_the_object_of_json():
    found = largest(planner(peak_bytes(6)))
    report = Report("m.py", "cpu", "", (found.largest.solution,), sizes=found)
    value = json.loads(json.dumps(to_json(report), allow_nan=False))["sizes"]
    assert value["largest"] == found.largest.size
    assert value["pays_until"] == found.saturation.size
    assert [c["size"] for c in value["candidates"]] == [c.size for c in found.candidates]
    assert value["candidates"][-1]["rate_per_s"] is None


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0.10371, "0.1037"), (999.94, "999.9"), (999.96, "1,000"), (34594.2, "34,590")],
)
def test_rates_are_written_in_full(per_s: float, text: str) -> None:
    assert _rate(per_s) == text
