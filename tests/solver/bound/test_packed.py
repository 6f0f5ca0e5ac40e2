"""Storages that may wait in fewer bits, on tiny graphs: the bound of all programs beside the truth.

A step here is several programs, as `graphs.rewrites.fewer_bits` makes them: nodes that pack some of
the storages that the backward pass reads, right after they are made, and nodes that unpack them
before they are read. The truth is the fastest schedule of any of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations

import pytest

from graphs.graph import Graph, Node, Tensor
from graphs.rewrites import Variants
from solver.bound import StorageGraph
from solver.schedule import Link, Place, Places, Request, simulate
from solver.solving import attempt
from tests.support import brute_force, brute_force_copies
from tests.support.brute_force_copies import HostLink, TooManyStatesError
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag

MOST_PLACES, MOST_NODES, MOST_NODES_WITH_HOST, MOST_LABELS = 2, 10, 8, 6_000
SEEDS_EACH = 10
FIRST_SEEDS = range(0, 10 * SEEDS_EACH, SEEDS_EACH)
Optimum = brute_force.Optimum | brute_force_copies.Optimum


def places_of(graph: Graph) -> list[str]:
    """Storages that could wait packed: the forward pass makes them whole, the backward pass reads
    them, nobody else holds them.
    """
    first, last = set(graph.outputs), [node for node in graph.nodes if node.phase == "backward"]
    read = {name for node in last for name in node.inputs}
    return [
        name
        for node in graph.nodes
        if node.phase == "forward"
        for name in node.outputs
        if name in read - first
        and graph.tensor_by_name[name].size_bytes > 1
        and all(each.alias_of != name for each in graph.tensors)
        and graph.root(name) == name
    ]


def packing(graph: Graph, names: Sequence[str], rng: random.Random) -> Graph:
    """The program in which these storages wait packed."""
    nodes: list[Node] = []
    tensors, unpacked = list(graph.tensors), dict[str, str]()
    for node in graph.nodes:
        if node.phase == "backward":
            for name in names:
                if name in node.inputs and name not in unpacked:
                    unpacked[name] = f"{name}.back"
                    size_bytes = graph.tensor_by_name[name].size_bytes
                    tensors.append(Tensor(unpacked[name], size_bytes))
                    nodes.append(_node(f"unpack {name}", f"{name}.packed", unpacked[name], rng))
            inputs = tuple(unpacked.get(name, name) for name in node.inputs)
            node = replace(node, inputs=inputs)
        nodes.append(node)
        for name in names:
            if name in node.outputs:
                size_bytes = rng.randint(1, graph.tensor_by_name[name].size_bytes - 1)
                tensors.append(Tensor(f"{name}.packed", size_bytes))
                pack = _node(f"pack {name}", name, f"{name}.packed", rng)
                nodes.append(replace(pack, phase="forward", recomputable=True))
    return Graph(nodes=tuple(nodes), tensors=tuple(tensors), outputs=graph.outputs)


def _node(name: str, read: str, made: str, rng: random.Random) -> Node:
    return Node(
        name=name,
        op="pack or unpack",
        inputs=(read,),
        outputs=(made,),
        time_s=rng.choice((0.0, 0.25, 0.5)),
        workspace_bytes=rng.choice((0, 0, 1)),
        phase="backward",
        recomputable=False,
    )


def there_and_back(rng: random.Random) -> Graph:
    """A chain whose backward pass reads what the forward pass makes, in reverse; here and there
    something that may not be computed again.
    """
    n, nodes = rng.randint(2, 3), list[Node]()
    sizes = {"x0": 1, f"g{n}": 1} | {f"x{i}": rng.randint(2, 6) for i in range(1, n + 1)}
    for i in range(1, n + 1):
        time_s, again = float(rng.randint(1, 5)), rng.random() < 0.75
        nodes.append(op(f"f{i}", f"x{i - 1}", f"x{i}", time_s=time_s, recomputable=again))
    for i in reversed(range(n)):
        sizes[f"g{i}"] = rng.randint(1, 2)
        read = f"g{i + 1} x{i + 1}" + f" x{i}" * (rng.random() < 0.5)
        nodes.append(op(f"b{i}", read, f"g{i}", phase="backward"))
    return make(nodes, sizes, outputs="g0")


def steps(first_seed: int, *, most_nodes: int) -> Iterator[tuple[Variants, int]]:
    """Each with all programs, and budgets from the least that one of them needs."""
    for seed in range(first_seed, first_seed + SEEDS_EACH):
        rng = random.Random(f"packed {seed}")
        graph = there_and_back(rng)
        if seed % 2:
            graph = random_dag(seed=seed, n_forward=rng.randint(2, 4), n_later=rng.randint(2, 3))
        names = places_of(graph)[:MOST_PLACES]
        if not names or len(graph.nodes) + 2 * len(names) > most_nodes:
            continue
        chosen = chain.from_iterable(combinations(names, k) for k in range(len(names) + 1))
        programs = tuple(packing(graph, each, random.Random(seed)) for each in chosen)
        least_bytes = min(int(StorageGraph.of(each).least_bytes.max()) for each in programs)
        peak_bytes = baseline_peak_bytes(graph)
        for budget_bytes in {least_bytes, least_bytes + 1, (least_bytes + peak_bytes) // 2}:
            yield Variants(graph, programs), budget_bytes


def test_programs_pack_what_the_backward_pass_reads() -> None:
    n_places = 0
    for step, _ in steps(0, most_nodes=MOST_NODES):
        for program in step.planned[1:]:
            packed = [node for node in program.nodes if node.name.startswith("pack ")]
            n_places += len(packed)
            for node in program.nodes:
                if node.phase == "backward":
                    assert not {each.inputs[0] for each in packed} & {*node.inputs}
    assert n_places > SEEDS_EACH


def check(
    step: Variants, budget_bytes: int, truths: Sequence[Optimum], places: Places | None
) -> float:
    """The seconds of the fastest schedule of all programs, by the simulator; the bound is not above
    it, and no plan is below it.
    """
    truth_s = math.inf
    for program, truth in zip(step.planned, truths, strict=True):
        if truth.ops is not None:
            simulation = simulate(program, truth.schedule(program), places=places)
            assert simulation.peak_bytes <= budget_bytes
            assert simulation.time_s == pytest.approx(truth.time_s)
            truth_s = min(truth_s, simulation.time_s)
    request = Request(budget_bytes, time_limit_s=6000, places=places, optimizer_state="device")
    found = attempt(step, request)
    assert found.lower_bound_s <= truth_s + 1e-9
    if found.simulation is not None:
        assert found.simulation.peak_bytes <= budget_bytes
        assert found.simulation.time_s >= truth_s - 1e-9
    return truth_s


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_the_bound_of_all_programs_is_below_the_truth(first_seed: int) -> None:
    for step, budget_bytes in steps(first_seed, most_nodes=MOST_NODES):
        truths = [brute_force.fastest(each, budget_bytes=budget_bytes) for each in step.planned]
        check(step, budget_bytes, truths, None)


def with_host(
    step: Variants, budget_bytes: int, rng: random.Random
) -> tuple[HostLink, list[brute_force_copies.Optimum]]:
    """A host, and the truth of each program with copies to it."""
    total_bytes = sum(tensor.size_bytes for tensor in step.plain.tensors)
    out_s = step.plain.baseline_time_s / total_bytes / rng.choice((0.3, 1, 3))
    host = HostLink(max(1, int(total_bytes * rng.choice((0.3, 1)))), out_s, out_s)
    return host, [
        brute_force_copies.fastest(
            each, budget_bytes=budget_bytes, host=host, max_labels=MOST_LABELS
        )
        for each in step.planned
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_the_bound_of_all_programs_is_below_the_truth_with_a_host(first_seed: int) -> None:
    rng = random.Random(f"host {first_seed}")
    for step, budget_bytes in steps(first_seed, most_nodes=MOST_NODES_WITH_HOST):
        with suppress(TooManyStatesError):
            host, truths = with_host(step, budget_bytes, rng)
            link = Link(1 / host.out_s_per_byte, 1 / host.in_s_per_byte)
            check(step, budget_bytes, truths, Places(host=Place(host.capacity_bytes, link)))
