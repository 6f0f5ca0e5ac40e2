"""Where parameters are, chosen with the plan: against the truth, and at real sizes."""

import dataclasses
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint_solver.cli import main
from graphs.graph import Graph
from graphs.host_state import (
    host_parameter_bytes,
    host_parameters,
    parameter_loads,
    with_state_on_host,
)
from graphs.synthetic.nets import residual
from solver.bound import StorageGraph
from solver.schedule import Link, Place, Places, Request, Solution, baseline
from solver.solving import answer, with_state_choices
from tests.support.brute_force_copies import HostLink, TooManyStatesError, fastest
from tests.support.optimizers import with_parameters, with_some_parameters
from tests.support.plain_simulator import assert_simulators_agree
from tests.support.schedules_with_copies import random_copies, random_places

MB = 10**6


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1)


def planned(graph: Graph, budget_bytes: int, to: Places | None, **options: str) -> Solution:
    options = {"parameters": "auto", **options}
    request = Request(budget_bytes=budget_bytes, places=to, time_limit_s=600, **options)
    return answer(graph, request)


@pytest.mark.slow(sample=1, keep=15)
@pytest.mark.parametrize("first_seed", range(0, 600, 10))
def test_bound_truth_and_plan_are_in_order(first_seed: int) -> None:
    """The truth is the best of all choices, each searched through with recomputation and copies."""
    for seed in range(first_seed, first_seed + 10):
        rng = random.Random(f"parameters {seed}")
        graph = with_some_parameters(seed, rng, n_later=1)
        folded = StorageGraph.of(graph, may_offload=True)
        total_bytes, total_s = sum(folded.unit_bytes) + 1, graph.baseline_time_s or 1.0
        per_byte_s = total_s / total_bytes / rng.choice((1, 4, 16))
        link = Link(1 / per_byte_s, 1 / per_byte_s, total_s * rng.choice((0, 0.05)))
        capacity_bytes = max(1, rng.choice((total_bytes, 3 * total_bytes, 10)))
        host = HostLink(capacity_bytes, per_byte_s, per_byte_s, link.latency_s)
        to = Places(host=Place(capacity_bytes, link))
        choices = with_state_choices(graph, to, parameters="auto").planned
        least = [int(StorageGraph.of(each, may_offload=True).least_bytes.max()) for each in choices]
        budget_bytes = rng.choice(least) + rng.choice((0, 1, 3))
        with suppress(TooManyStatesError):
            truth_s = min(
                fastest(each, budget_bytes=budget_bytes, host=host, max_labels=4_000).time_s
                for each in choices
            )
            found = planned(graph, budget_bytes, to)
            assert found.lower_bound_s <= truth_s + 1e-9
            if found.simulation is None:
                continue
            assert found.simulation.time_s >= truth_s - 1e-9
            assert found.simulation.peak_bytes <= budget_bytes
            assert found.simulation.host_peak_bytes <= capacity_bytes


@pytest.mark.slow(sample=15)
@pytest.mark.parametrize("seed", range(30))
def test_both_simulators_agree(seed: int) -> None:
    rng = random.Random(f"parameters and copies {seed}")
    graph = with_some_parameters(seed, rng)
    link = Link(rng.choice((0.5, 2.0)), rng.choice((0.5, 2.0)), rng.choice((0.0, 0.5)))
    away = with_state_on_host(
        graph, out_s=link.out_s, in_s=link.in_s, parameters=host_parameters(graph)
    )
    for _ in range(10):
        assert_simulators_agree(away, random_copies(away, baseline(away), rng), random_places(rng))


def big_step(n_blocks: int = 12, weight_bytes: int = 50 * MB) -> Graph:
    """Each block reads a parameter, forward and backward; gradients are not counted."""
    graph = residual(n_blocks=n_blocks)
    names = [f"w{i}" for i in range(n_blocks)]
    n_forward, n_nodes = len(graph.forward_nodes), len(graph.nodes)
    reads: dict[int, str] = {}
    for i, name in enumerate(names):
        reads[i * n_forward // n_blocks] = name
        reads[n_nodes - 1 - i * (n_nodes - n_forward) // n_blocks] = name
    nodes = tuple(
        dataclasses.replace(node, inputs=(*node.inputs, reads[i])) if i in reads else node
        for i, node in enumerate(graph.nodes)
    )
    tensors = [
        dataclasses.replace(graph.tensors[0], name=n, size_bytes=weight_bytes) for n in names
    ]
    graph = dataclasses.replace(graph, nodes=nodes, tensors=(*graph.tensors, *tensors))
    return with_parameters(graph, names, [(1, weight_bytes // 5, 1e-5)] * n_blocks)


def places(bytes_per_s: float, capacity_bytes: int = 10**12) -> Places:
    return Places(host=Place(capacity_bytes, Link(bytes_per_s, bytes_per_s)))


@pytest.mark.slow
def test_they_are_chosen_where_it_pays() -> None:
    graph = big_step()
    weights_bytes = 12 * 50 * MB
    budgets = {
        "none": 10**12,
        "state": graph.resident_bytes - 50 * MB,
        "some": graph.resident_bytes - 150 * MB,
        "all": graph.resident_bytes - 450 * MB,
    }
    found = {what: planned(graph, size, places(450e9)) for what, size in budgets.items()}
    away = {what: host_parameter_bytes(each.graph) for what, each in found.items()}
    assert away == {"none": 0, "state": 0, "some": weights_bytes // 2, "all": weights_bytes}
    for what, each in found.items():
        assert each.simulation is not None, what
        assert each.simulation.peak_bytes <= budgets[what]
        assert each.simulation.time_s >= each.lower_bound_s
    assert planned(graph, budgets["all"], places(450e9), parameters="device").simulation is None
    assert planned(graph, budgets["all"], places(450e9, 400 * MB)).simulation is None
    assert planned(graph, 10**12, places(450e9), parameters="host").overhead


def test_the_choices_of_choices_are_the_same() -> None:
    graph, to = big_step(), places(50e9)
    once = with_state_choices(graph, to, parameters="auto")
    away = [host_parameter_bytes(each) for each in once.planned]
    assert away == [0, 0, 300 * MB, 600 * MB]
    assert with_state_choices(once, to, parameters="auto").planned == once.planned
    assert with_state_choices(once, None).planned == (graph,)


def test_a_request_says_where_they_may_be() -> None:
    asked = Request(10, places=places(1.0), parameters="auto")
    value = asked.to_json()
    assert value["parameters"] == "auto"
    assert Request.from_json(value, source="", budget_bytes=10, method="auto") == asked
    assert "parameters" not in dataclasses.replace(asked, parameters="device").to_json()
    with pytest.raises(ValueError, match="parameters is 'disk'; one of auto, device, host"):
        Request(10, parameters="disk")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, path = big_step(n_blocks=6), str(tmp_path / "graph.json")
    graph.save(path)
    page, plan, own = (str(tmp_path / name) for name in ("page.html", "plan.json", "own.json"))
    budget = ["--budget", str(graph.resident_bytes - 100 * MB)]
    host = ["--host", "1TB", "--host-link", "50GB/s", "--parameters", "auto"]
    outputs = ["-o", plan, "--graph-out", own, "--report", page]
    assert main([*budget, *host, *outputs, path]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"parameters 300\.0 MB .* on the host, \+\d+\.\d\d % time with the", printed)
    assert "300.0\u00a0MB" in Path(page).read_text()
    for given in (path, own):
        loaded = Solution.load(plan, graph=given)
        assert host_parameter_bytes(loaded.graph) == 300 * MB
    assert main(["explain", plan, own]) == 0
    capsys.readouterr()
    assert main([*budget, "--parameters", "auto", path]) == 2
    assert "--parameters auto: give the memory for them" in capsys.readouterr().err
    assert main([*budget, *host[:4], "--parameters", "host", "--optimizer-state", "device", path])
    assert "leave out --optimizer-state device" in capsys.readouterr().err
