"""Where the optimizer's state is, chosen with the plan: against the truth, and at real sizes."""

import dataclasses
import io
import math
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from checkpoint_solver.cli import main
from graphs.graph import Graph
from graphs.host_state import StateBucket, state_copies_s, with_state_on_host
from graphs.synthetic.nets import residual
from solver.bound import StorageGraph
from solver.plan_analysis import advise
from solver.plan_analysis.pareto import sweep
from solver.reporting.report_data import Report, to_json
from solver.reporting.terminal import show
from solver.schedule import Link, Place, Places, Request, Solution, baseline, simulate
from solver.sizes_deadlines_progress import BudgetError, format_time
from solver.solving import answer, solve, with_state_choices
from tests.support.brute_force_copies import HostLink, TooManyStatesError, fastest
from tests.support.budgets import budget_above_resident
from tests.support.optimizers import with_some_state, with_state
from tests.support.plain_simulator import assert_simulators_agree, simulate_plainly
from tests.support.schedules_with_copies import random_copies, random_places
from tests.support.synthetic_graphs import random_dag

MB = 10**6


def big_step(*, state_bytes: int = 400 * MB, n_buckets: int = 20) -> Graph:
    graph = residual(n_blocks=12)
    each = StateBucket(1, state_bytes // n_buckets, MB, 1e-4)
    return with_state(graph, [each] * n_buckets, workspace_bytes=MB, time_s=1e-4 * n_buckets)


def places(bytes_per_s: float, capacity_bytes: int = 10**12) -> Places:
    return Places(host=Place(capacity_bytes, Link(bytes_per_s, bytes_per_s)))


def planned(graph: Graph, budget_bytes: int, to: Places | None) -> Solution:
    return answer(graph, Request(budget_bytes=budget_bytes, places=to, time_limit_s=600))


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("first_seed", range(0, 400, 10))
def test_bound_truth_and_plan_are_in_order(first_seed: int) -> None:
    """The truth is the better of the two: both searched through, every schedule with copies."""
    for seed in range(first_seed, first_seed + 10):
        rng = random.Random(f"state {seed}")
        graph = random_dag(seed=seed, n_forward=rng.randint(2, 3), n_later=rng.randint(1, 2))
        graph = with_some_state(graph, rng, most_bytes=6)
        folded = StorageGraph.of(graph, may_offload=True)
        total_bytes, total_s = sum(folded.unit_bytes) + 1, graph.baseline_time_s or 1.0
        per_byte_s = total_s / total_bytes / rng.choice((1, 4, 16))
        latency_s = total_s * rng.choice((0, 0.05))
        state_bytes = sum(b[1] for b in graph.meta.environment["optimizer"]["buckets"])
        host_bytes = state_bytes + rng.choice((-1, 0, 1, total_bytes))
        host = HostLink(max(1, host_bytes), per_byte_s, per_byte_s, latency_s)
        link = Link(1 / per_byte_s, 1 / per_byte_s, latency_s)
        to = Places(host=Place(host.capacity_bytes, link))
        budget_bytes = int(folded.least_bytes.max()) + rng.choice((-3, -1, 0, 1, 3))
        both = [graph, with_state_on_host(graph, out_s=link.out_s, in_s=link.in_s)]
        with suppress(TooManyStatesError):
            truths = [
                fastest(each, budget_bytes=budget_bytes, host=host, max_labels=4_000).time_s
                for each in both
                if each is not None
            ]
            found = planned(graph, budget_bytes, to)
            assert found.lower_bound_s <= min(truths) + 1e-9
            if found.simulation is None:
                continue
            assert found.simulation.time_s >= min(truths) - 1e-9
            assert found.simulation.peak_bytes <= budget_bytes
            assert found.simulation.host_peak_bytes <= host.capacity_bytes


@pytest.mark.slow(sample=15)
@pytest.mark.parametrize("seed", range(30))
def test_both_simulators_agree(seed: int) -> None:
    rng = random.Random(f"state and copies {seed}")
    graph = with_some_state(random_dag(seed=seed, n_forward=5, n_later=4), rng, most_bytes=6)
    link = Link(rng.choice((0.5, 2.0)), rng.choice((0.5, 2.0)), rng.choice((0.0, 0.5)))
    away = with_state_on_host(graph, out_s=link.out_s, in_s=link.in_s)
    for _ in range(10):
        assert_simulators_agree(away, random_copies(away, baseline(away), rng), random_places(rng))


def test_the_optimizer_waits_for_the_link() -> None:
    """A copy that is still on its way when the optimizer would step delays it."""
    from tests.support.small_graphs import make, op, plan

    graph = make(
        [op("f", "x", "a"), op("b", "a", "g", phase="backward")],
        {"x": 1, "a": 8, "g": 1},
        outputs="g",
    )
    graph = with_state(graph, [StateBucket(1, 4, 0, 1.0)], time_s=1.0)
    link = Link(1.0, 1.0)
    away = with_state_on_host(graph, out_s=link.out_s, in_s=link.in_s)
    schedule = plan(away, "f store:a b optimizer_step")
    to = Places(host=Place(100, link))
    # f 0-1, the copy 1-9, b 1-2; the state 9-13, stepped 13-14, back 14-18
    assert simulate(away, schedule, places=to).time_s == 18
    assert simulate_plainly(away, schedule, to)[0] == 18
    assert simulate(graph, plan(graph, "f store:a b optimizer_step"), places=to).time_s == 9


def test_it_is_chosen_where_it_pays() -> None:
    """Below what the device needs with its state, and where copies of activations cost more."""
    graph = big_step()
    budget_bytes = graph.resident_bytes - 100 * MB
    assert planned(graph, budget_bytes, None).simulation is None
    found = planned(graph, budget_bytes, places(50e9))
    assert found.graph.host_state_bytes == 400 * MB
    assert found.simulation.peak_bytes <= budget_bytes
    assert found.simulation.host_peak_bytes >= 400 * MB
    assert found.overhead >= found.lower_bound_overhead > 0


def test_it_is_not_chosen_where_the_link_is_slow() -> None:
    graph = big_step()
    budget_bytes = budget_above_resident(graph, 0.6)
    alone, slow = planned(graph, budget_bytes, None), planned(graph, budget_bytes, places(1e6))
    assert slow.graph.host_state_bytes == 0
    assert slow.simulation.time_s <= alone.simulation.time_s
    # the bound is for both: below the plan, and not below what each can do
    assert slow.lower_bound_s <= slow.simulation.time_s


@pytest.mark.slow
def test_it_is_not_chosen_where_there_is_no_room_for_it() -> None:
    graph = big_step()
    budget_bytes = graph.resident_bytes - 100 * MB
    assert planned(graph, budget_bytes, places(50e9, 399 * MB)).simulation is None
    full = planned(graph, budget_bytes, places(50e9, 400 * MB))
    assert not full.schedule.has_copies
    assert full.simulation.host_peak_bytes == 400 * MB


def test_the_host_is_shared_with_copies() -> None:
    graph = big_step()
    least = planned(graph, budget_above_resident(graph, 0.0) - 300 * MB, places(1e12, 450 * MB))
    assert least.graph.host_state_bytes == 400 * MB
    assert least.simulation.host_peak_bytes <= 450 * MB


def test_a_wide_budget_leaves_it_on_the_device() -> None:
    graph = big_step()
    found = planned(graph, 10**12, places(50e9))
    assert found.graph.host_state_bytes == 0
    assert found.overhead == 0.0


def test_the_choices_of_choices_are_the_same() -> None:
    graph = big_step()
    to = places(50e9)
    once = with_state_choices(graph, to)
    assert [each.host_state_bytes for each in once.planned] == [0, 400 * MB]
    twice = with_state_choices(once, to)
    assert twice.planned == once.planned
    assert with_state_choices(once, None).planned == (graph,)
    assert once.plain == graph


def test_a_saved_plan_says_where_the_state_is(tmp_path: Path) -> None:
    graph = big_step()
    found = planned(graph, graph.resident_bytes - 100 * MB, places(50e9))
    path = tmp_path / "schedule.json"
    found.save(path)
    assert '"state_on_host": true' in path.read_text()
    for given in (graph, found.graph):
        loaded = Solution.load(path, graph=given)
        assert loaded.graph == found.graph
        assert loaded.simulation == found.simulation
        assert loaded.overhead == found.overhead
    found.graph.save(tmp_path / "graph.json")
    assert '"host_state_bytes": 400000000' in (tmp_path / "graph.json").read_text()
    again = solve(tmp_path / "graph.json", budget="100GB")  # a graph is planned anew
    assert again.graph == graph


def test_a_graph_that_cannot_have_its_state_back() -> None:
    graph = with_state_on_host(big_step(), out_s=lambda _: 0.0, in_s=lambda _: 0.0)
    bare = dataclasses.replace(graph, meta=dataclasses.replace(graph.meta, environment={}))
    with pytest.raises(BudgetError, match=r"400\.0 MB.*more than the 0 B given"):
        planned(bare, 10**12, None)
    found = planned(bare, 10**12, places(50e9))
    assert found.graph == bare
    assert found.simulation is not None
    assert not math.isinf(found.lower_bound_s)


def report_of(found: Solution) -> Report:
    return Report(problem="a step", device="", costs="", solutions=(found,))


def test_a_curve_reaches_below_the_state() -> None:
    graph = big_step()
    budgets = [graph.resident_bytes - 100 * MB, graph.resident_bytes + 500 * MB]
    found = {
        where: sweep(
            graph, budgets=budgets, like=Request(0, places=places(50e9), optimizer_state=where)
        ).points
        for where in ("auto", "device", "host")
    }
    sizes = {
        where: [p.graph.host_state_bytes if p.simulation else None for p in points]
        for where, points in found.items()
    }
    assert sizes["auto"][0] == 400 * MB
    assert sizes["device"] == [None, 0]
    assert sizes["host"] == [400 * MB] * 2


def test_the_request_says_where_it_may_be() -> None:
    asked = Request(10, places=places(50e9), optimizer_state="host")
    value = asked.to_json()
    assert value["optimizer_state"] == "host"
    again = Request.from_json(value, source="", budget_bytes=10, method="auto")
    assert again == asked
    assert "optimizer_state" not in dataclasses.replace(asked, optimizer_state="auto").to_json()
    with pytest.raises(ValueError, match="optimizer_state is 'disk'; one of auto, device, host"):
        Request(10, optimizer_state="disk")


def text_of(found: Solution) -> str:
    file = io.StringIO()
    show(report_of(found), Console(file=file, width=200))
    return file.getvalue()


def test_the_report_says_where_the_state_is() -> None:
    graph = big_step()
    away = planned(graph, graph.resident_bytes - 100 * MB, places(50e9))
    row = r"optimizer state +400\.0 MB \(\S+ MiB\) on the host, \+\d+\.\d\d % time"
    assert re.search(row, text_of(away))
    assert to_json(report_of(away))["schedule"]["host_state_bytes"] == 400 * MB
    here = planned(graph, 10**12, places(50e9))
    assert "optimizer state" not in text_of(here)
    assert "besides" not in text_of(here)
    optimizer = {"name": "LBFGS", "state_stays": "LBFGS steps all at once"}
    meta = graph.meta.with_environment(optimizer=optimizer)
    stays = planned(dataclasses.replace(graph, meta=meta), 10**12, places(50e9))
    assert re.search(r"optimizer state +on the device: LBFGS steps all at once", text_of(stays))


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report, a page, a picture and an explanation of a plan with state on the host."""
    graph, path = big_step(n_buckets=200), str(tmp_path / "graph.json")
    graph.save(path)
    options = ["--host", "1GB", "--host-link", "50GB/s", "--optimizer-state", "host"]
    page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
    files = [str(tmp_path / "plan.json"), str(tmp_path / "planned.json")]
    away = with_state_on_host(graph, out_s=lambda _: 0.0, in_s=lambda _: 0.0)
    assert away is not None
    for budget_bytes in (10**10, budget_above_resident(away, 0.6)):  # without copies, and with some
        outputs = ["--report", str(page), "--plot", str(plot), "-o", files[0]]
        outputs += ["--graph-out", files[1]]
        assert main(["--budget", str(budget_bytes), *options, *outputs, path]) == 0
        printed = capsys.readouterr().out
        assert re.search(r"optimizer state +400\.0 MB", printed)
        assert "optimizer state" in page.read_text()
        assert main(["explain", *files]) == 0
        capsys.readouterr()
    assert "Copies to the host" in printed
    slower = format_time(state_copies_s(Solution.load(files[0], graph=files[1]).graph))
    told = " ".join(printed.split())
    assert f"besides these, copies of the optimizer's state make its step {slower} longer" in told
    assert "not hidden, besides the optimizer's state" in told
    assert "besides the optimizer's state during the computation" in plot.read_text()
    assert main(["--budget", "10GB", "--optimizer-state", "host", path]) == 2
    assert "--optimizer-state host: give the memory for it, --host 64GB" in capsys.readouterr().err
    small = ["--host", "1MB", "--host-link", "50GB/s", "--optimizer-state", "host"]
    assert main(["--budget", "10GB", *small, path]) == 2
    assert "takes 400.0 MB (381.47 MiB) of host memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (None, '"64GB") keeps the optimizer\'s state in host memory between uses'),
        (places(25e9, MB), "; the optimizer's state (400.0 MB) does not fit into the 1.00 MB of"),
    ],
    ids=["no host", "a small host"],
)
def test_where_nothing_fits_the_host_is_named(host: Places | None, said: str) -> None:
    found = {each.kind: each.text for each in advise(planned(big_step(), 10 * MB, host))}
    assert said in found["state"]


@pytest.mark.parametrize(
    "environment", [{"sharding": {"n_ranks": 2}}, {"device": "cpu"}], ids=["sharded", "cpu"]
)
def test_where_there_is_no_other_memory_no_host_is_named(environment: dict[str, object]) -> None:
    graph = big_step()
    meta = dataclasses.replace(graph.meta, environment={**graph.meta.environment, **environment})
    found = advise(planned(dataclasses.replace(graph, meta=meta), 10 * MB, None))
    assert "host" not in {each.kind: each.text for each in found}["state"]
