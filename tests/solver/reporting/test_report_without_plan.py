"""Reports where nothing was found: what is in the way, and what would be enough."""

from __future__ import annotations

import math

import pytest

from solver.plan_analysis.advice import advise
from solver.reporting.report_data import to_json
from solver.schedule.solution import Obstacle
from solver.sizes_deadlines_progress import IN_PYTHON, OF_THE_COMMAND
from solver.solving import solve
from tests.solver.reporting.test_report import gpt2, nothing_found, report_of, shown
from tests.support.small_graphs import make, op

__all__ = ["gpt2"]


def test_infeasible_for_every_method(gpt2):
    text = shown(report_of(nothing_found(gpt2, lower_bound_s=math.inf)))
    assert "no schedule fits 4.00 GB" in text
    assert "lower bound" not in text


def test_infeasible_for_this_method(gpt2):
    text = " ".join(shown(report_of(nothing_found(gpt2))).split())
    assert "method none finds no schedule that fits" in text
    assert "5.25 GB, the smallest at which none found a plan" in text


def test_what_stands_in_the_way_is_named(gpt2):
    on_device = (("_log_softmax", 10**9), ("mm", 10**8), ("t1", 3), ("t2", 2), ("t3", 1))
    on_device = tuple((list(gpt2.producer)[i], size) for i, (_, size) in enumerate(on_device))
    op = gpt2.nodes[5].name
    obstacle = Obstacle(10**10, 2 * 10**10, None, op, (*on_device, ("primals_1", 7)))
    text = " ".join(shown(report_of(nothing_found(gpt2, obstacle=obstacle))).split())
    assert "no schedule fits below 10.00 GB" in text
    assert f"bottleneck op {gpt2.nodes[5].name}" in text
    assert "1 more 1 B, resident 326.1 MB" in text
    assert "minimum budget 20.00 GB" in text


def test_a_minimum_budget_that_is_proven_is_not_given_twice(gpt2):
    obstacle = Obstacle(10**10, 10**10, None, gpt2.nodes[5].name, ())
    text = " ".join(shown(report_of(nothing_found(gpt2, obstacle=obstacle))).split())
    assert "minimum budget 10.00 GB" in text
    assert "no schedule fits in less" in text


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_least_budget_that_the_clock_cut_short_says_so(gpt2, cut_short):
    obstacle = Obstacle(10**10, 2 * 10**10, None, gpt2.nodes[-1].name, (), cut_short=cut_short)
    report = report_of(nothing_found(gpt2, obstacle=obstacle))
    assert (
        "ended the search for the minimum budget" in " ".join(shown(report).split())
    ) == cut_short
    assert to_json(report)["infeasible"]["cut_short"] is cut_short


def test_nothing_within_the_time_limit(gpt2):
    text = " ".join(shown(report_of(nothing_found(gpt2, status="time_limit"))).split())
    assert "extend it with --time-limit" in text


def test_each_reader_has_words_of_their_own(gpt2):
    """No option of the command in a report from Python, no argument in the command's."""
    late = nothing_found(gpt2, status="time_limit", obstacle=Obstacle(9, 9, None, "", (), True))
    in_python, of_the_command = (
        " ".join(shown(report_of(late, reader=reader)).split())
        for reader in (IN_PYTHON, OF_THE_COMMAND)
    )
    assert in_python.count("extend it with time_limit_s=") == 2
    assert of_the_command.count("extend it with --time-limit") == 2
    assert " --" not in in_python
    assert "time_limit_s" not in of_the_command
    wide = solve(gpt2, budget="3.5GB", time_limit_s=600)
    texts = [
        {advice.kind: advice.text for advice in advise(wide, reader=reader)}
        for reader in (IN_PYTHON, OF_THE_COMMAND)
    ]
    assert not any(" --" in text for text in texts[0].values())


def test_what_the_bottleneck_requires_adds_up():
    graph = make(
        [op("f", "x", "a"), op("back", "a", "g", phase="backward", workspace_bytes=500)],
        {"x": 10, "a": 200, "g": 40},
        outputs="g",
    )
    report = report_of(solve(graph, budget=600))
    text = " ".join(shown(report).split())
    assert "requires a 200 B, g 40 B, workspace 500 B, resident 10 B" in text
    found = to_json(report)["infeasible"]
    live_bytes = sum(each["size_bytes"] for each in found["on_device"])
    assert found["proven_budget_bytes"] == live_bytes + 500 + 10
    assert found["workspace_bytes"] == 500
