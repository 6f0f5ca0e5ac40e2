"""What the allocator takes for a schedule, beside what the simulator counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graphs.graph import Graph
from solver.methods import METHODS
from solver.schedule import Compute, Schedule, baseline, simulate
from solver.schedule.reserved_memory import (
    Reserved,
    expandable_segments,
    reserved,
    state_blocks_bytes,
)
from solver.schedule.simulator import stays
from tests.support.paths import GPT2
from tests.support.schedules_with_copies import random_copies
from tests.support.small_graphs import make, op, plan
from tests.support.synthetic_graphs import random_dag

MIB = 2**20
STATE = "optimizer_state"


def rounded_peak_bytes(graph: Graph, schedule: Schedule) -> int:
    """The largest sum of sizes in steps of 512, position by position."""

    def rounded(size_bytes: int) -> int:
        return -(-size_bytes // 512) * 512

    size_bytes = {t.name: rounded(t.size_bytes) for t in graph.tensors}
    resident = sum(size_bytes[t.name] for t in graph.resident if t.alias_of is None)
    found = list(stays(graph, schedule))
    peak = resident
    for position, each in enumerate(schedule.ops):
        live = sum(size_bytes[s.storage] for s in found if s.start <= position < s.stop)
        if isinstance(each, Compute):
            live += rounded(graph.node_by_name[each.node].workspace_bytes)
        peak = max(peak, resident + live)
    return peak


def random_schedule(seed: int) -> tuple[Graph, Schedule]:
    graph = random_dag(seed=seed, n_forward=6, n_later=6)
    larger = {t.name: t.size_bytes * (1 + seed % 7) * 300_001 for t in graph.tensors}
    graph = Graph.from_json(
        {
            **graph.to_json(),
            "tensors": [{**t, "size_bytes": larger[t["name"]]} for t in graph.to_json()["tensors"]],
        }
    )
    schedule = baseline(graph)
    if seed % 3 == 1:
        budget_bytes = int(0.9 * simulate(graph, schedule).peak_bytes)
        proposal = METHODS["auto"](graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
        schedule = proposal.schedule or schedule
    elif seed % 3 == 2:
        schedule = random_copies(graph, schedule, random.Random(seed))
    return graph, schedule


@pytest.mark.slow
def test_with_expandable_segments_what_is_allocated_is_the_simulated_peak_with_rounded_sizes():
    for seed in range(60):
        graph, schedule = random_schedule(seed)
        found = reserved(graph, schedule, expandable=True)
        assert found.allocated_bytes == rounded_peak_bytes(graph, schedule), seed
        assert found.reserved_bytes >= found.allocated_bytes
        default = reserved(graph, schedule, expandable=False)
        assert default.allocated_bytes >= found.allocated_bytes
        assert default.reserved_bytes >= default.allocated_bytes


@pytest.mark.parametrize(
    ("kind", "n_buffers"),
    [("op", 1), ("fsdp.copy_in", 1), ("fsdp.all_gather", 2), ("fsdp.reduce_scatter", 2)],
)
@pytest.mark.parametrize("expandable", [False, True])
def test_buffers_of_fsdp2s_streams_are_not_for_the_step(kind: str, n_buffers: int, expandable):
    """A buffer is free when the next tensor of its size is made: another stream cannot have it."""
    gather = replace(op("gather", "p", "flat"), op=kind)
    nodes = [gather, op("copy_out", "flat", "small"), op("f", "small", "big")]
    sizes = {"p": 512, "flat": 40 * MIB, "small": 512, "big": 40 * MIB}
    graph = make(nodes, sizes, outputs="big")
    found = reserved(graph, baseline(graph), expandable=expandable)
    assert found.allocated_bytes < 41 * MIB
    assert found.reserved_bytes == n_buffers * 40 * MIB + 2 * MIB


def test_gpt2():
    graph = Graph.load(GPT2)
    schedule = baseline(graph)
    peak_bytes = simulate(graph, schedule).peak_bytes
    default = reserved(graph, schedule, expandable=False)
    expandable = reserved(graph, schedule, expandable=True)
    assert peak_bytes <= expandable.allocated_bytes <= default.allocated_bytes
    assert expandable.reserved_bytes < default.reserved_bytes < 1.01 * peak_bytes
    for each, kind in ((default, False), (expandable, True)):  # what N_STEPS says
        assert reserved(graph, schedule, expandable=kind, n_steps=2) == each


def trained(state_bytes: int) -> Graph:
    """40 MiB that are free again when the gradients are made; one parameter is frozen."""
    nodes = [
        *(op("f", "p frozen", "a"), op("g", "a q", "b"), op("h", "b", "dp dq")),
        op("step", "p q dp dq state", "", phase="optimizer", recomputable=False),
    ]
    sizes = {"p": 20 * MIB, "q": 10 * MIB, "frozen": 512, "a": 40 * MIB, "b": 512}
    sizes |= {"dp": 20 * MIB, "dq": 10 * MIB, "state": state_bytes}
    graph = make(nodes, sizes, outputs="dp dq")
    kinds = {"dp": "gradient", "dq": "gradient", "state": STATE}
    kinds |= dict.fromkeys(("p", "q", "frozen"), "parameter")
    tensors = (replace(t, kind=kinds.get(t.name, t.kind)) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def test_the_optimizers_state_is_taken_at_the_end_of_the_first_step():
    """It takes some of a's place, which the second step takes anew; known from the start it would
    not."""
    graph = trained(30 * MIB)
    held = tuple(replace(t, kind="buffer") if t.name == "state" else t for t in graph.tensors)
    from_start = replace(graph, tensors=held)
    first = reserved(graph, baseline(graph), expandable=False, n_steps=1)
    found = reserved(graph, baseline(graph), expandable=False)
    assert first.reserved_bytes == (30 + 40 + 20 + 2) * MIB
    assert found.reserved_bytes == (30 + 40 + 20 + 2) * MIB + 40 * MIB
    known = reserved(from_start, baseline(from_start), expandable=False)
    assert known.reserved_bytes == (30 + 30 + 40 + 2) * MIB
    assert found.allocated_bytes == known.allocated_bytes


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_state_is_taken_for_one_trained_parameter_after_the_other(n_blocks: int):
    graph = trained(30 * MIB * n_blocks + 12)
    sizes_bytes = state_blocks_bytes(graph, 30 * MIB * n_blocks + 12)
    assert sum(sizes_bytes) == 30 * MIB * n_blocks + 12
    large = [n for n in sizes_bytes if n > MIB]
    assert large == pytest.approx([20 * MIB] * n_blocks + [10 * MIB] * n_blocks, abs=12)
    unnamed = tuple(replace(t, kind="buffer") for t in graph.tensors)
    assert state_blocks_bytes(replace(graph, tensors=unnamed), 30) == [30]


def test_whether_it_fits_a_device():
    graph = Graph.load(GPT2)
    schedule = baseline(graph)
    free = reserved(graph, schedule, expandable=True)
    full = reserved(graph, schedule, expandable=True, capacity_bytes=free.reserved_bytes)
    assert full == free
    less = reserved(graph, schedule, expandable=True, capacity_bytes=free.allocated_bytes - 1)
    assert not less.settled
    assert less.reserved_bytes < free.allocated_bytes


def test_memory_between_what_stays_is_lost():
    """a and c are given back around b: 58 MiB find no place there."""
    nodes = [op("f", "p", "a"), op("g", "a", "b"), op("h", "b", "c"), op("k", "b", "d")]
    sizes = {"p": 512, "a": 30 * MIB, "b": 30 * MIB, "c": 30 * MIB, "d": 58 * MIB}
    graph = make(nodes, sizes, outputs="d")
    schedule = plan(graph, "f g -a h -c k -b")
    found = reserved(graph, schedule, expandable=False, n_steps=1)
    assert found == Reserved(88 * MIB + 512, 118 * MIB + 2 * MIB)  # c takes the place of a


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:40, expandable_segments: true", True),
        ("expandable_segments:False", False),
    ],
)
def test_the_environment_says_which(monkeypatch: pytest.MonkeyPatch, value: str, asked: bool):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    assert expandable_segments() is asked
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert expandable_segments() is asked
